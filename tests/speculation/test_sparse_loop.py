"""The loop with sparse verification: plain decoding's text where everything is kept, and what was read."""

import functools

import numpy as np
import pytest

from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.sampling_params import SamplingParams
from tests.drafters import run_script
from tests.sparsity.plain_selection import plain_blocks, plain_tokens
from tests.speculation.sparse_tools import check_summaries
from tests.tiny import (
    TINY,
    attention_plan,
    decode,
    make_model,
    prefilled,
    random_prompts,
    replace,
    row_counts,
    sequences,
)

NEW, BLOCK = 40, 16
MODEL = replace(TINY, num_layers=1)
EVERYTHING = attention_plan(MODEL, keep=1.0)


@functools.cache
def plain():
    prompts = random_prompts((5, 20, 33, 1))
    return prompts, decode(*make_model(MODEL), NoDraft(), prompts, new_tokens=NEW)[0]


def run_scripted(plan, right, **options):
    """The state after drafts of which changing numbers are right."""
    prompts, expected = plain()
    limits = [len(prompt) + NEW for prompt in prompts]
    state = prefilled(*make_model(MODEL), prompts, limits=limits, sparsity=plan)
    return run_script(*make_model(MODEL), state, expected, right=right, sparsity=plan, **options)


CHAIN_RIGHT, TREE_RIGHT = (8, 3, 0, 5, 1, 2, 7, 4), (3, 0, 2, 4, 1)


def test_any_number_of_drafted_tokens():
    """0 .. 8 of which a changing number is right, in ragged rows: the text is plain decoding's."""
    accepted = []
    for most in range(9):
        state = run_scripted(EVERYTHING, CHAIN_RIGHT, max_drafted=most)
        assert sequences(state) == plain()[1]
        accepted.append(sum(row.accepted for row in row_counts(state, 9)))
    assert accepted[0] == 0 and accepted[1] > 0 and accepted[8] > accepted[1]


def test_trees():
    """Two branches, of which one or the other is right for some tokens."""
    state = run_scripted(EVERYTHING, TREE_RIGHT, branches=2)
    assert sequences(state) == plain()[1]
    assert sum(row.accepted for row in row_counts(state, 9)) > 0
    check_summaries(state)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_cache_grows_in_mid_run(sampled):
    """A bucket of 48 positions fills up on the way; sampled rows with their seeds, too."""
    prompts, _ = plain()
    sampling = [SamplingParams(temperature=0.8 * sampled, top_k=20, seed=i) for i in range(4)]
    options = {"new_tokens": NEW, "sampling": sampling}
    expected, _ = decode(*make_model(MODEL), NoDraft(), prompts, **options)
    assert sampled == (expected != plain()[1])
    got, state = decode(
        *make_model(MODEL), PromptLookup(4), prompts, capacity=48, sparsity=EVERYTHING, **options
    )
    assert got == expected and state.cache.capacity == 96
    rows = row_counts(state, 5)
    assert 0 < sum(row.accepted for row in rows) < sum(row.drafted for row in rows)
    check_summaries(state)


def test_a_single_row_in_a_cache_of_one_block():
    """Whatever the budget, there is one block to choose from, and it is read."""
    prompts, expected = plain()
    plan = attention_plan(MODEL, block_size=128, keep=0.01)
    got, _ = decode(*make_model(MODEL), NoDraft(), prompts[1:2], new_tokens=NEW, sparsity=plan)
    assert got == expected[1:2]


L0 = 48


def test_what_was_read_and_rows_within_l0():
    """Blocks of every step, counted by hand. Rows 0 and 3 never get beyond l0: their text is plain
    decoding's, whatever stands beside them."""
    prompts, expected = plain()
    state = run_scripted(attention_plan(MODEL, l0=L0, rho=0.25, local_blocks=1), CHAIN_RIGHT)
    got = sequences(state)
    assert [got[0], got[3]] == [expected[0], expected[3]]
    trace = {name: np.asarray(getattr(state.trace, name)) for name in ("step", "kv_blocks")}
    seen = set()
    for row, (prompt, text) in enumerate(zip(prompts, got)):
        assert (trace["kv_blocks"][row, : len(prompt) + 1] == 0).all()  # prompt and prefill's token: dense
        length = len(prompt)
        for step in sorted(set(trace["step"][row, length + 1 : len(text)].tolist())):
            places = np.flatnonzero(trace["step"][row, : len(text)] == step)
            assert places[0] == length + 1  # the step began behind `length` committed tokens
            held = plain_blocks(length, BLOCK)
            budget = max(plain_blocks(plain_tokens(length, L0, "0.25"), BLOCK), 2)
            blocks = MODEL.num_kv_heads * min(budget, held)
            assert trace["kv_blocks"][row, places].tolist() == [blocks] * len(places)
            length += len(places)
            seen.add((min(budget, held), held))
    assert {(1, 1), (3, 3), (4, 4)} <= seen and any(read < held for read, held in seen)


def test_dense_verification_counts_no_blocks():
    prompts, _ = plain()
    _, state = decode(*make_model(MODEL), NoDraft(), prompts, new_tokens=NEW)
    assert (np.asarray(state.trace.kv_blocks) == 0).all()
