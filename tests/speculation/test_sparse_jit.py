"""What the compiled loop does not do when it verifies sparsely: recompile, copy caches, gather shards."""

import dataclasses
import functools
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.ahead_of_time import hlo
from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.speculation.loop import decode_slice
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import start_state
from tests.speculation.test_jit import (
    CAPACITY,
    COMPILING,
    DISTINCT,
    count_compilations,
    gathered,
)
from tests.tiny import (
    TINY,
    attention_plan,
    decode,
    make_model,
    prefilled,
    random_prompts,
    replace,
    run_to_end,
)

ONE_LAYER = replace(TINY, num_layers=1)
PLAN, DRAFTER = attention_plan(ONE_LAYER, l0=64, rho=0.5), PromptLookup(4)


def with_budget(l0, rho):
    return dataclasses.replace(PLAN, attention=PLAN.attention.with_budget(l0, rho))


def test_nothing_recompiles_when_budgets_lengths_or_selections_change():
    rng = np.random.default_rng(0)

    def run(seed, budget):
        sparsity = with_budget(*budget)
        lengths = rng.integers(1, 60, 4)
        prompts, limits = random_prompts(lengths, seed=seed), lengths + rng.integers(1, 50, 4)
        state = prefilled(*make_model(ONE_LAYER), prompts, limits=limits, sparsity=sparsity)
        state = run_to_end(*make_model(ONE_LAYER), DRAFTER, state, max_steps=20, sparsity=sparsity)
        return set(np.unique(state.trace.kv_blocks).tolist())

    run(0, (64, 0.5))
    events: list[str] = []
    listener = partial(count_compilations, events)
    jax.monitoring.register_event_duration_secs_listener(listener)
    reads = set()
    for seed, budget in enumerate([(64, 0.5), (0, 0.5), (0, 0.0), (33, 0.3), (64, 0.0)], 1):
        reads |= run(seed, budget)
    assert events == []
    assert len(reads) > 4  # budgets and lengths did differ

    jax.jit(lambda x: x * 5 + len(reads))(jnp.ones(3))
    assert set(events) == set(COMPILING)  # the listener does hear
    jax.monitoring.unregister_event_duration_listener(listener)


def test_a_slice_donates_summaries_too():
    prompts = random_prompts((5, 9, 2, 7))
    state = prefilled(*make_model(ONE_LAYER), prompts, limits=[20] * 4, sparsity=PLAN)
    after = decode_slice(*make_model(ONE_LAYER), DRAFTER, state, jnp.int32(3), sparsity=PLAN)
    assert all(array.is_deleted() for array in jax.tree.leaves((state.cache, state.summaries)))
    assert not any(array.is_deleted() for array in jax.tree.leaves(after))


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(text):
    """Number of collectives by opcode and shapes of their results."""
    among = [i for i in hlo.instructions(text) if i.opcode.startswith(COLLECTIVES)]
    return Counter((i.opcode, i.shapes) for i in among)


PLANS = {
    "piecewise": {"l0": 32, "rho": 0.25},  # with a branch for batches within l0
    "mass": {"keep": 0.5, "score": "mass"},
}


@functools.cache
def compiled(mesh, name):
    """Text of the program for a plan (None: dense), the state that it takes, and its parameters."""
    model = replace(DISTINCT, num_layers=1)
    target, params = make_model(model, mesh)
    plan = None if name is None else attention_plan(model, **PLANS[name])
    request = make_request([3] * 4, [12] * 4, eos_ids=[[3]] * 4)
    state = start_state(target, request, capacity=CAPACITY, sparsity=plan)
    lowered = decode_slice.lower(target, params, DRAFTER, state, jnp.int32(10), sparsity=plan)
    return lowered.compile().as_text(), state, params


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        pytest.param((1, 1), "piecewise", id="1x1"),
        pytest.param((2, 2), "piecewise", id="2x2"),
        pytest.param((2, 2), "mass", id="2x2, mass"),
    ],
)
def test_loop_body(mesh, name):
    """No copy of a cache, nothing that waits for the host. On a mesh it communicates what dense verification
    does, and one bit: whether all rows are within l0."""
    text, state, params = compiled(mesh, name)
    cache = state.cache.keys[0]
    inside = hlo.loop_instructions(text)
    # The reader sees the loop: an update of the cache for K and V.
    cache_shape = cache.sharding.shard_shape(cache.shape)
    assert sum(i.has_shape(cache_shape) and i.opcode in ("fusion", "scatter") for i in inside) >= 2
    assert hlo.copies(inside, cache_shape) == []
    host = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")
    assert [i.line for i in inside if i.opcode in host or "callback" in i.line] == []
    assert gathered(text, params)[0] == []
    dense = collectives(compiled(mesh, None)[0]) if mesh == (2, 2) else Counter()
    more = collectives(text) - dense
    assert bool(collectives(text)) == (mesh == (2, 2))
    assert all(dims == () for _, shapes in more for _, dims in shapes), more
    # Summaries lie where their rows and KV heads do.
    for leaf in jax.tree.leaves(state.summaries):
        assert leaf.shape[:3] == (4, DISTINCT.num_kv_heads, CAPACITY // 16)
        assert leaf.sharding.shard_shape(leaf.shape)[:2] == cache_shape[:2]


NEW = 16
PROMPTS = random_prompts((40, 70, 13, 1))


@pytest.mark.parametrize(
    ("mesh", "drafter", "prompts"),
    [
        pytest.param((2, 1), NoDraft(), PROMPTS, id="2x1"),
        pytest.param((1, 2), NoDraft(), PROMPTS, id="1x2"),
        pytest.param((4, 2), DRAFTER, PROMPTS, id="4x2"),
        pytest.param((4, 2), DRAFTER, [PROMPTS[1], [], PROMPTS[0], []], id="4x2, padding rows"),
    ],
)
def test_same_tokens_on_every_mesh(mesh, drafter, prompts):
    """Shards select for their own rows and heads, and choose what one device does."""
    options = {"new_tokens": NEW, "sparsity": with_budget(0, 0.5)}
    expected, alone = decode(*make_model(ONE_LAYER), drafter, prompts, **options)
    got, state = decode(*make_model(ONE_LAYER, mesh), drafter, prompts, **options)
    assert got == expected
    np.testing.assert_array_equal(state.trace.kv_blocks, alone.trace.kv_blocks)
    for leaf in jax.tree.leaves(state.summaries):
        shard = leaf.addressable_shards[0].data.shape
        assert shard[:2] == (len(prompts) // mesh[0], ONE_LAYER.num_kv_heads // mesh[1])
