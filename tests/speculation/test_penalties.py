"""Penalties count token by token, whatever a step accepts: against a plain decoder in numpy."""

import dataclasses
import functools
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.sampling_params import SamplingParams
from sv_jax.speculation.penalties import TokenCounts, count_committed, count_tokens, penalise, process_logits
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import start_state
from sv_jax.speculation.tree import ancestor_mask
from tests import drafters
from tests.drafters import run_script
from tests.plain_decoder import PlainDecoder, logits_of, penalised
from tests.tiny import decode, histograms, make_model, make_target, prefilled, random_prompts, sequences

NEW = 40
PROMPTS = random_prompts((5, 20, 33, 1))
PENALTIES = [
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.3},
    {"presence_penalty": 0.8},
    # Rewards: the text says the same token again and again.
    {"repetition_penalty": 0.9, "frequency_penalty": -0.2, "presence_penalty": -0.5},
]
RULES = {
    "greedy": [SamplingParams(**penalties) for penalties in PENALTIES],
    "sampled": [SamplingParams(temperature=0.6, top_k=20, seed=7, **penalties) for penalties in PENALTIES],
}


@functools.cache
def plain(rule):
    return decode(*make_model(), NoDraft(), PROMPTS, new_tokens=NEW, sampling=RULES[rule])[0]


def deciders(rule):
    return [PlainDecoder(functools.partial(logits_of, *make_model()), params) for params in RULES[rule]]


def scripted(rule, right, **options):
    limits = [len(prompt) + NEW for prompt in PROMPTS]
    state = prefilled(*make_model(), PROMPTS, limits=limits, sampling=RULES[rule])
    state = run_script(*make_model(), state, plain(rule), right, **options)
    return sequences(state), state


def differing(rule, texts):
    """Rows that plain decoding does not emit."""
    rows = []
    for row, (decoder, prompt, text) in enumerate(zip(deciders(rule), PROMPTS, texts)):
        if decoder.shortfalls(prompt, text[len(prompt) :]).max() > 1e-3:
            rows.append(row)
    return rows


@pytest.mark.parametrize("rule", RULES)
def test_plain_decoding(rule):
    assert differing(rule, plain(rule)) == []
    neutral, _ = decode(*make_model(), NoDraft(), PROMPTS, new_tokens=NEW)
    if rule == "greedy":  # each penalty shows in its row
        assert all(text != other for text, other in zip(plain(rule), neutral))
        assert [max(Counter(t[len(p) :]).values()) for p, t in zip(PROMPTS, plain(rule))][3] > NEW // 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", range(1, 9))
def test_chains(rule, k):
    """Accepted runs of all lengths up to K, with what was rejected behind them."""
    for right in ((k,), (0, k, 1, k // 2, k, k - 1)):
        texts, state = scripted(rule, right, max_drafted=k)
        assert differing(rule, texts) == []
        assert (histograms(state, 9)[:, k + 1] > 0).all() or right != (k,)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("branches", [2, 3])
def test_trees(rule, branches):
    """A node's siblings and their children are not before it."""
    depth = 6 // branches
    texts, state = scripted(rule, (depth, 1, 0, depth), num_tokens=6, branches=branches)
    assert differing(rule, texts) == []
    assert histograms(state, 9)[:, depth + 1].sum() > 4


@pytest.mark.parametrize("rule", RULES)
def test_prompt_lookup(rule):
    texts, _ = decode(*make_model(), PromptLookup(4), PROMPTS, new_tokens=NEW, sampling=RULES[rule])
    assert differing(rule, texts) == []


def test_counting_per_step_is_found(monkeypatch):
    """The planted mistake: a node does not count the drafted tokens before it."""

    def per_step(committed, state, tokens, ancestors):
        return count_tokens(committed, state, tokens, ancestors & (jnp.arange(tokens.shape[1]) == 0))

    monkeypatch.setattr(sys.modules[count_tokens.__module__], "count_tokens", per_step)
    # A function of its own, or the program without the mistake would run.
    steps = jax.jit(lambda *args: drafters.scripted_steps(*args), static_argnums=drafters.STATIC)
    texts, _ = scripted("greedy", (8,), steps=steps)
    assert {0, 1, 2} <= set(differing("greedy", texts))  # each kind of penalty


TREE = [-1, 0, 0, 1, 1, 2, -1]


def random_state(rows, capacity=16):
    """Rows in the middle of their output; the last one is about to emit its first token."""
    rng = np.random.default_rng(0)
    request = make_request([6] * rows, [99] * rows, sampling=RULES["greedy"][:1] * rows)
    state = start_state(make_target(), request, capacity=capacity)
    tokens = jnp.asarray(rng.integers(0, 8, (rows, capacity + 1)), jnp.int32)
    return dataclasses.replace(state, tokens=tokens, lengths=jnp.array([*range(7, 6 + rows), 5]))


def test_counts_of_every_node_of_a_tree():
    """The root counts, though it is not committed; leftovers behind the length do not."""
    state = random_state(4)
    root = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)
    drafted = jnp.asarray(np.random.default_rng(1).integers(0, 8, (4, len(TREE) - 1)), jnp.int32)
    nodes = jnp.concatenate([root, drafted], axis=1)
    committed = jax.jit(count_committed, static_argnums=1)(state, 8)
    counts = jax.jit(count_tokens)(committed, state, nodes, ancestor_mask(jnp.array([TREE] * 4)))
    everywhere, output = map(np.asarray, counts)
    for row in range(4):
        # An empty slot is never looked at. In the last row the root is the prompt's last token, and alone.
        for node in range(len(TREE) - 1) if row < 3 else [0]:
            path, at = [], node
            while at >= 0:
                path, at = [int(nodes[row, at]), *path], TREE[at]
            text = [*state.tokens[row, : state.lengths[row]].tolist(), *path]
            assert everywhere[row, node].tolist() == np.bincount(text, minlength=8).tolist()
            assert output[row, node].tolist() == np.bincount(text[6:], minlength=8).tolist()


@pytest.mark.parametrize("together", [5, 17, 2048])
def test_tokens_are_counted_in_chunks(together, monkeypatch):
    """The last chunk overlaps the one before; a token counts once."""
    monkeypatch.setattr(sys.modules[count_tokens.__module__], "COUNTED_TOGETHER", together)
    state = random_state(4)
    counts = count_committed(dataclasses.replace(state, lengths=jnp.array([16, 0, 9, 5])), 8)
    for row, length in enumerate((16, 0, 9, 5)):
        text = state.tokens[row, :length].tolist()
        for count, tokens in zip(counts, (text, text[6:])):
            assert count[row].tolist() == np.bincount(tokens, minlength=8).tolist()


def test_without_penalties_nothing_is_counted():
    state = random_state(4)
    neutral = make_request([6] * 4, [99] * 4).sampling
    assert not np.any(count_committed(dataclasses.replace(state, sampling=neutral), 8))
    assert np.any(count_committed(state, 8))


def test_penalties_of_random_counts():
    """Formulas against numpy, all rules side by side."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (4, 1, 50)).astype(np.float32)
    prompts, outputs = (rng.integers(0, 50, (4, 20)).tolist() for _ in range(2))
    seen, output = (
        np.array([np.bincount(text, minlength=50) for text in texts])[:, None].astype(np.float32)
        for texts in ([p + o for p, o in zip(prompts, outputs)], outputs)
    )
    sampling = make_request([1] * 4, [1] * 4, sampling=RULES["greedy"]).sampling
    ours = np.asarray(penalise(logits, sampling, TokenCounts(seen, output)))[:, 0]
    for row, params in enumerate(RULES["greedy"]):
        expected = penalised(logits[row, 0], prompts[row], outputs[row], params)
        np.testing.assert_allclose(ours[row], expected, rtol=1e-5, atol=1e-5)
        assert (ours[row] != logits[row, 0]).any()


@pytest.mark.parity
@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty):
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(0)
    logits, ids = rng.normal(0, 3, (5, 200)).astype(np.float32), rng.integers(0, 200, (5, 60))
    processor = processors.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.from_numpy(ids), torch.from_numpy(logits.copy())).numpy()
    params = [SamplingParams(repetition_penalty=penalty)] * 5
    sampling = make_request([1] * 5, [1] * 5, sampling=params).sampling
    seen = np.array([np.bincount(row, minlength=200) for row in ids])[:, None].astype(np.float32)
    np.testing.assert_array_equal(
        penalise(logits[:, None], sampling, TokenCounts(seen, 0 * seen))[:, 0], expected
    )


def test_no_end_before_the_minimum_and_no_id_beyond_the_tokenizer():
    """Of each node by its own position: 8, 9, 9, 10 ..; -1 in eos_ids is no id."""
    request = make_request([6] * 2, [99] * 2, min_lengths=[10, 0], eos_ids=[[3, 5], [3]], vocab_size=60)
    state = dataclasses.replace(start_state(make_target(), request, capacity=16), lengths=jnp.array([7, 7]))
    ancestors = ancestor_mask(jnp.array([TREE] * 2))
    following = jnp.array([[8, 9, 9, 10, 10, 10, 8]] * 2)
    logits = jnp.zeros((2, len(TREE), 64))
    nodes, committed = jnp.zeros((2, len(TREE)), jnp.int32), TokenCounts(*jnp.zeros((2, 2, 64)))
    never = np.asarray(process_logits(logits, committed, state, nodes, ancestors, following))
    for row, node in np.ndindex(2, len(TREE)):
        early = [3, 5] if row == 0 and following[0, node] < 10 else []
        assert np.flatnonzero(np.isneginf(never[row, node])).tolist() == [*early, 60, 61, 62, 63]
