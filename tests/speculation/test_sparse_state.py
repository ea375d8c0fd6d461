"""Block summaries in a state: after prefill, commits and growth they are those of the committed keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.drafts.none import NoDraft
from sv_jax.sparsity import step
from sv_jax.speculation.commit import commit
from sv_jax.speculation.loop import decode_slice, verify_and_accept
from sv_jax.speculation.penalties import TokenCounts
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import grow_state, start_state
from sv_jax.speculation.types import Acceptance, Draft
from tests.speculation.sparse_tools import check_summaries
from tests.tiny import (
    TINY,
    attention_plan,
    make_model,
    make_target,
    prefilled,
    random_prompts,
    replace,
)

BLOCK, T = 16, 6
MODEL = replace(TINY, num_layers=1)
PLANS = {
    score: attention_plan(MODEL, block_size=BLOCK, keep=0.5, score=score)
    for score in ("mean", "bound", "mass")
}


def random_acceptance(rng, batch):
    """Any accepted path through any tree: nodes in order, the root first."""
    emitted = rng.integers(1, T + 1, batch)
    path = np.full((batch, T), T - 1)
    for row, count in zip(path, emitted):
        row[:count] = [0, *sorted(rng.choice(np.arange(1, T), count - 1, replace=False))]
    tokens = rng.integers(0, 64, (batch, T))
    return Acceptance(*(x.astype(np.int32) for x in (tokens, emitted, path)))


@pytest.mark.parametrize("score", PLANS)
def test_commits(score):
    """Rows accept different paths; rejected nodes are NaN. Row 1 is finished, row 2 stops at its limit,
    and rows 3 to 5 at an EOS token."""
    rng = np.random.default_rng(0)
    batch, capacity = 6, 64
    eos_ids = [[]] * 3 + [list(range(0, 64, 9))] * 3
    request = make_request([1] * batch, [65, 65, 21, 65, 65, 65], eos_ids=eos_ids)
    target = make_target(MODEL)
    state = start_state(target, request, capacity=capacity, sparsity=PLANS[score])
    finished = np.arange(batch) == 1
    state = dataclasses.replace(state, finished=finished)
    shape = (MODEL.num_layers, 2, batch, T, MODEL.num_kv_heads, MODEL.head_dim)
    draft = Draft(np.zeros((batch, T), np.int32), np.zeros((batch, T), np.int32) - 1)
    run = jax.jit(commit, static_argnames="sharding")
    while max(state.lengths.tolist()) + T <= capacity:
        acceptance = random_acceptance(rng, batch)
        new_kv = rng.normal(size=shape).astype(np.float32)
        for row, (path, count) in enumerate(zip(acceptance.path, acceptance.num_emitted)):
            rejected = np.setdiff1d(np.arange(T), path[:count])
            new_kv[:, :, row, rejected] = np.nan
        state = run(state, draft, draft, tuple(map(tuple, new_kv)), acceptance, target.sharding)
        check_summaries(state)
    assert state.lengths[1] == 0 and state.lengths[2] == 20 and len(set(state.lengths.tolist())) > 3


@pytest.mark.parametrize(("chunk", "score"), [(1, "mean"), (7, "bound"), (40, "mass")])
def test_prefill_in_chunks_and_growth(chunk, score):
    """Prompts that end before, at and behind the edge of a block; short ones wait for the longest. A larger
    bucket changes nothing."""
    target, params = make_model(MODEL)
    prompts = random_prompts((1, 15, 16, 17, 33, 40, 0))
    state = prefilled(
        target, params, prompts, limits=[60] * 7, chunk=chunk, capacity=96, sparsity=PLANS[score]
    )
    assert state.lengths.tolist() == [1, 15, 16, 17, 33, 40, 0]
    check_summaries(state)
    before = jax.tree.map(np.asarray, state.summaries)
    state = grow_state(target, state, capacity=192)
    check_summaries(state)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.summaries)):
        assert new.shape[2] == 192 // BLOCK
        np.testing.assert_array_equal(old, new[:, :, : old.shape[2]])


def test_whom_a_step_asks(monkeypatch):
    """The root and drafted tokens, not empty slots; finished rows do not keep a batch from the dense path."""

    class AskedError(Exception):
        pass

    def ask(plan, asked, lengths, live, **_):
        raise AskedError(asked, lengths.tolist(), live.tolist())

    monkeypatch.setattr(step, "summary_scorer", lambda plan, summaries, lengths, nodes: nodes.tolist())
    monkeypatch.setattr(step, "make_chooser", ask)
    plan = PLANS["mass"]
    state = start_state(make_target(MODEL), make_request([1] * 3, [60] * 3), capacity=64, sparsity=plan)
    state = dataclasses.replace(
        state, lengths=np.array([30, 0, 50], np.int32), finished=np.array([False, True, True])
    )
    parents = jnp.array([[-1, 0, 1], [-1, -1, -1], [-1, -1, 0]])
    committed = TokenCounts(*jnp.zeros((2, 3, MODEL.vocab_size)))
    with pytest.raises(AskedError) as error:
        verify_and_accept(*make_model(MODEL), state, Draft(jnp.zeros_like(parents), parents), committed, plan)
    nodes = [[True, True, True], [True, False, False], [True, False, True]]
    assert error.value.args == (nodes, [30, 0, 50], [True, False, False])


def test_without_a_plan_there_are_none():
    target, params = make_model(MODEL)
    state = start_state(target, make_request([1], [9]), capacity=64)
    assert state.summaries is None
    with pytest.raises(ValueError, match="start_state needs the same sparsity plan"):
        decode_slice(target, params, NoDraft(), state, np.int32(1), sparsity=PLANS["mean"])
