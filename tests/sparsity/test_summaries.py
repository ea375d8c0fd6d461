"""Summaries of blocks: those of the committed keys, whatever was written, rejected and written over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packing import unpack_heads
from sv_jax.model.cache import KVCache, cache_shape
from sv_jax.sharding import make_sharding
from sv_jax.sparsity.summaries import STATISTICS, planned_summaries, summarise, update_summaries
from tests.sparsity.plain_selection import plain_summary
from tests.tiny import TINY, attention_plan, replace

MODEL = replace(TINY, num_layers=3)
CAPACITY = 128
ROWS = 12


def check(summaries, cache, lengths):
    """Every statistic of every block, from the keys alone. Blocks without keys have 0."""
    for layer, summary in enumerate(summaries.layers):
        if summary is None:
            continue
        keys = np.asarray(unpack_heads(cache.keys[layer], MODEL.head_dim))
        for name, got in summary.items():
            expected = [
                plain_summary(name, row, n, summaries.block_size) for row, n in zip(keys, lengths.tolist())
            ]
            np.testing.assert_allclose(got, expected, atol=1e-6, err_msg=f"{name} of layer {layer}")


@pytest.mark.parametrize("names", STATISTICS.values())
def test_statistics_by_definition(names):
    """Blocks that are full, partly filled, with one key and with none; NaN in dead keys changes no bit."""
    rng = np.random.default_rng(0)
    size = 16
    keys = rng.normal(size=(2, 5, size, 8)).astype(np.float32)
    alive = np.arange(size) < np.array([16, 11, 1, 0, 8])[:, None]
    run = jax.jit(summarise, static_argnums=2)
    got = run(keys, alive, names)
    for name in names:
        for head, block in np.ndindex(2, 5):
            expected = plain_summary(name, keys[head : head + 1, block], int(alive[block].sum()), size)[0, 0]
            np.testing.assert_allclose(got[name][head, block], expected, atol=1e-6)
    poisoned = run(np.where(alive[None, :, :, None], keys, np.nan), alive, names)
    jax.tree.map(np.testing.assert_array_equal, got, poisoned)
    dead = run(np.full_like(keys, np.nan), np.zeros_like(alive), names)
    assert all((array == 0).all() for array in dead.values())


def test_bfloat16_keys_are_averaged_in_float32():
    keys = jnp.full((1, 1, 128, 4), 1.0, jnp.bfloat16).at[0, 0, 0].set(1.5)
    mean = summarise(keys, jnp.ones((1, 128), bool), ("mean",))["mean"]
    np.testing.assert_allclose(mean, 1 + 0.5 / 128, rtol=1e-6)  # bfloat16 would round it to 1


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("block_size", "num_tokens", "score"),
    [
        (16, 1, "mean"),
        (16, 5, "bound"),
        (16, 17, "mean"),
        (32, 40, "bound"),
        (64, 9, "mean"),
        (128, 9, "mean"),
        (16, 5, "mass"),
        (64, 20, "mass"),
    ],
)
def test_random_accepts_and_rejects(group, block_size, num_tokens, score):
    """Steps that write T slots and keep some of them, in rows that end up all over the cache, row 0 at its
    very end. What is rejected is NaN: it must show nowhere, neither then nor once it is written over."""
    rng = np.random.default_rng(0)
    plan = attention_plan(MODEL, block_size=block_size, score=score, anchors=(0, 2)).attention
    layers = (jnp.zeros(cache_shape(MODEL, ROWS, CAPACITY, group)),) * MODEL.num_layers
    cache, summaries = KVCache(layers, layers), planned_summaries(plan, MODEL, ROWS, CAPACITY)
    assert [layer is not None for layer in summaries.layers] == [True, False, True]
    lengths, last_start = np.zeros(ROWS, np.int32), CAPACITY - num_tokens

    @jax.jit
    def commit(cache, summaries, new_kv, before, after):
        cache = cache.write(new_kv, before, make_sharding(MODEL))
        return cache, update_summaries(summaries, cache, before, after, num_tokens, make_sharding(MODEL))

    step = 0
    while lengths.max() <= last_start:
        kept = rng.integers(0, num_tokens + 1, ROWS).astype(np.int32)
        kept[0] = num_tokens if lengths[0] == last_start else min(num_tokens, last_start - lengths[0])
        kept[1] = 0
        kept[0 if step % 4 == 3 else 1] = 0  # row 0 is rejected now and then, wherever it stands
        kept = np.minimum(kept, np.maximum(last_start - lengths, kept[0] * (np.arange(ROWS) == 0)))
        rejected = (np.arange(num_tokens) >= kept[:, None])[..., None, None]
        shape = (2, MODEL.num_layers, ROWS, num_tokens, MODEL.num_kv_heads, MODEL.head_dim)
        new = np.where(rejected, np.nan, rng.normal(size=shape)).astype(np.float32)
        cache, summaries = commit(cache, summaries, tuple(zip(*new)), lengths, lengths + kept)
        lengths, step = lengths + kept, step + 1
        if step % 8 == 0:
            check(summaries, cache, lengths)
    assert lengths[0] == CAPACITY and lengths[1] == 0 and len(set(lengths.tolist())) > ROWS // 2
    check(summaries, cache, lengths)
