"""Where each token came from: the step, what it verified and proposed, and whether it was foreseen."""

import functools

import numpy as np
import pytest

from sv_jax.drafts.none import NoDraft
from tests.drafters import run_script
from tests.tiny import decode, make_model, prefilled, random_prompts, row_counts

NEW = 25
PROMPTS = [*random_prompts((5, 20)), [], *random_prompts((1,), seed=1)]
ROWS = (0, 1, 3)


@functools.cache
def plain():
    return decode(*make_model(), NoDraft(), PROMPTS, new_tokens=NEW)[0]


def run(right, max_drafted, **sizes):
    """[rows, NEW] of step, drafted, proposed and foreseen; and the counts of every row."""
    limits = [len(prompt) + NEW for prompt in PROMPTS]
    state = prefilled(*make_model(), PROMPTS, limits=limits)
    state = run_script(*make_model(), state, plain(), right, max_drafted=max_drafted, **sizes)
    trace = state.trace
    arrays = (np.asarray(x) for x in (trace.step, trace.drafted, trace.proposed, trace.foreseen))
    starts = [len(prompt) for prompt in PROMPTS]
    return [np.array([x[i, starts[i] : starts[i] + NEW] for i in ROWS]) for x in arrays], row_counts(state, 9)


def useful(proposed):
    """What is left of K proposed tokens at each output position, when one of NEW tokens is the last."""
    return [min(proposed, max(0, NEW - 1 - position)) for position in range(1, NEW)]


@pytest.mark.parametrize("right", [8, 0], ids=["right", "wrong"])
def test_proposals_that_nothing_verifies(right):
    """Plain steps: one token each, and whether the proposal was the token that came."""
    (step, drafted, proposed, foreseen), counts = run((right,), max_drafted=0)
    assert (step == np.arange(NEW)).all() and (drafted == 0).all()
    assert proposed[0].tolist() == [0, *useful(8)] and (proposed == proposed[0]).all()
    # The first token is the prefill's; nothing is proposed where only one more may come.
    assert foreseen[0].tolist() == [False, *[right > 0] * (NEW - 2), False]
    assert (foreseen == foreseen[0]).all()
    assert all((row.accepted, row.drafted, row.steps_with_draft) == (0, 0, 0) for row in counts)
    assert [row.plain_steps for row in counts] == [NEW - 1, NEW - 1, 0, NEW - 1]


def test_drafts_that_are_verified_in_part():
    """Of 8 proposed tokens the first 3 are verified: each step emits them and a token of its own."""
    (step, drafted, proposed, foreseen), counts = run((8,), max_drafted=3)
    assert step[0].tolist() == [0, *(1 + i // 4 for i in range(NEW - 1))]
    assert foreseen[0].tolist() == [False, *[True, True, True, False] * 6]
    # Of the step, at every token that it emitted.
    starts = [1 + 4 * (i // 4) for i in range(NEW - 1)]
    assert drafted[0].tolist() == [0, *(useful(3)[start - 1] for start in starts)]
    assert proposed[0].tolist() == [0, *(useful(8)[start - 1] for start in starts)]
    assert (step == step[0]).all() and (foreseen == foreseen[0]).all()
    for row in ROWS:
        found = counts[row]
        assert (found.histogram[4], found.accepted, found.drafted, found.steps) == (6, 18, 18, 6)


@pytest.mark.parametrize("max_drafted", [0, 1])
def test_any_branch_of_a_tree_may_have_foreseen_a_token(max_drafted):
    """Two branches, of which the first or the second one is right, by the row's length."""
    (_, drafted, _, foreseen), _ = run((3,), max_drafted, num_tokens=6, branches=2)
    # Accepted, or seen without verifying; a step that verified says so of its accepted tokens alone.
    expected = [True] * (NEW - 2) if max_drafted == 0 else [True, False] * (NEW // 2 - 1) + [True]
    assert foreseen[0, 1:-1].tolist() == expected
    assert set(drafted[0, 1:-2].tolist()) == {2 * max_drafted}
