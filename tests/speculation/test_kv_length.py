"""A cache that the data axis cuts over its length: the same tokens, all that is written where it belongs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.ahead_of_time import hlo
from sv_jax.config import Cuts
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.model.cache import KVCache, cache_shape
from sv_jax.sharding import make_sharding
from sv_jax.sparsity.summaries import planned_summaries, update_summaries
from sv_jax.speculation.loop import decode_slice
from tests.tiny import (
    TINY,
    attention_plan,
    make_model,
    prefilled,
    random_prompts,
    replace,
    run_to_end,
    sequences,
)

CUTS = Cuts(kv_shard="data")
MESHES = [(4, 1), (2, 2), (4, 2)]
WINDOWED = replace(TINY, sliding_windows=(24, None))
CAPACITY, LIMIT = 256, 200


def place(x, sharding, *axes):
    return jax.device_put(x, sharding.named(*axes))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("tokens", [1, 7, 100])  # 100: more than a device has slots
def test_writes_go_where_they_belong(mesh, tokens):
    """At every start, those around the edges of parts among them; nothing else changes."""
    rng = np.random.default_rng(0)
    shape, capacity = cache_shape(TINY, 2, CAPACITY), CAPACITY
    layers = [rng.normal(size=shape).astype(np.float32) for _ in range(2 * TINY.num_layers)]
    cache = KVCache(tuple(layers[:2]), tuple(layers[2:]))
    new_shape = (2, tokens, TINY.num_kv_heads, TINY.head_dim)
    new = tuple(tuple(rng.normal(size=new_shape).astype(np.float32) for _ in "kv") for _ in range(2))
    write = jax.jit(KVCache.write, static_argnums=3)
    whole, cut = make_sharding(TINY), make_sharding(TINY, mesh, CUTS)
    part = capacity // mesh[0]
    for start in (0, 1, part - tokens, part - 1, part, part + 1, 2 * part - 3, capacity - tokens):
        lengths = np.clip([start, capacity - tokens], 0, capacity - tokens).astype(np.int32)
        for a, b in zip(
            jax.tree.leaves(write(cache, new, lengths, whole)),
            jax.tree.leaves(write(cache, new, lengths, cut)),
        ):
            np.testing.assert_array_equal(a, b)


def texts(config, mesh, cuts, sparsity, implementation=None):
    target, params = make_model(config, mesh, cuts=cuts, implementation=implementation)
    # A repeated prompt gives drafts that are accepted, a random one those that are not.
    prompts = [(random_prompts([9])[0] * 9)[:70], random_prompts([130], seed=1)[0]]
    state = prefilled(
        target, params, prompts, limits=[LIMIT, LIMIT], capacity=CAPACITY, chunk=32, sparsity=sparsity
    )
    state = run_to_end(target, params, PromptLookup(4), state, sparsity=sparsity)
    return sequences(state), np.asarray(state.trace.kv_blocks)


@pytest.mark.parametrize(
    ("mesh", "config", "keep"),
    [((4, 1), TINY, 0.3), ((2, 2), WINDOWED, None), ((4, 2), TINY, None), ((4, 2), WINDOWED, 0.3)],
    ids=["4x1-sparse", "2x2-windowed", "4x2", "4x2-windowed-sparse"],
)
def test_the_same_tokens(mesh, config, keep):
    """Prefill, dense and sparse steps over rows that lie on several devices, in two rows at once."""
    sparsity = None if keep is None else attention_plan(config, keep=keep, score="mass")
    whole, whole_blocks = texts(config, (1, 1), Cuts(), sparsity)
    cut, cut_blocks = texts(config, mesh, CUTS, sparsity)
    assert cut == whole
    np.testing.assert_array_equal(cut_blocks, whole_blocks)
    assert len(whole[0]) == LIMIT


@pytest.mark.parametrize("mesh", MESHES)
def test_summaries_of_the_parts(mesh):
    plan = attention_plan(TINY, keep=0.3, score="mass").attention
    rng = np.random.default_rng(0)
    layers = tuple(
        rng.normal(size=cache_shape(TINY, 2, CAPACITY)).astype(np.float32) for _ in range(TINY.num_layers)
    )
    cache, empty = KVCache(layers, layers), planned_summaries(plan, TINY, 2, CAPACITY)
    update = jax.jit(update_summaries, static_argnums=(4, 5))
    for before in (0, 60, 64, 120, 250):
        lengths = np.array([before, max(before - 40, 0)], np.int32)

        def both_commits(sharding, lengths=lengths):
            all_before = update(empty, cache, np.zeros_like(lengths), lengths, CAPACITY, sharding)
            return update(all_before, cache, lengths, lengths + 6, 6, sharding)

        cut = both_commits(make_sharding(TINY, mesh, CUTS))
        for a, b in zip(jax.tree.leaves(both_commits(make_sharding(TINY))), jax.tree.leaves(cut)):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_what_travels():
    """No part of a cache is brought together: only scores of blocks, and merged attention."""
    target, params = make_model(TINY, (4, 2), cuts=CUTS)
    sparsity = attention_plan(TINY, keep=0.3, score="mass")
    state = prefilled(
        target, params, random_prompts([60]), limits=[80], capacity=CAPACITY, chunk=32, sparsity=sparsity
    )
    keys = state.cache.keys[0]
    shard = keys.sharding.shard_shape(keys.shape)
    assert shard == (1, 1, CAPACITY // 4, TINY.head_dim)
    text = (
        decode_slice.lower(target, params, PromptLookup(4), state, jnp.int32(9), sparsity=sparsity)
        .compile()
        .as_text()
    )
    inside = hlo.loop_instructions(text)
    assert hlo.copies(inside, shard) == [] and hlo.copies(inside, keys.shape) == []
    gathered = [i for i in inside if i.opcode.startswith(("all-gather", "all-to-all"))]
    assert not [i.line for i in gathered if i.has_shape(keys.shape) or i.has_shape((1, 2, CAPACITY, 8))]
    assert {"all-gather", "all-reduce"} == set(hlo.collectives(inside))
