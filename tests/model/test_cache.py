import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.platform import LAYOUTS
from sv_jax.model.cache import KVCache, cache_axes, cache_shape
from tests.tiny import TINY

LAYERS, BATCH, CAPACITY, TOKENS = 2, 3, 9, 4


def filled(layout):
    """A cache in which every number is different."""
    shape = cache_shape(TINY, BATCH, CAPACITY, layout)
    size = int(np.prod(shape))
    arrays = [
        jnp.arange(i * size, (i + 1) * size, dtype=jnp.float32).reshape(shape) for i in range(2 * LAYERS)
    ]
    return KVCache(tuple(arrays[:LAYERS]), tuple(arrays[LAYERS:]), layout)


def by_slot(array, layout):
    """[B, S, K, D], whatever the layout."""
    return np.transpose(np.asarray(array), [layout.index(axis) for axis in "BSKD"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_puts_each_row_at_its_own_length(layout):
    cache = filled(layout)
    lengths = np.array([0, 3, CAPACITY - TOKENS], np.int32)
    shape = (BATCH, TOKENS, TINY.num_kv_heads, TINY.head_dim)
    rng = np.random.default_rng(0)
    new = [tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in "kv") for _ in range(LAYERS)]
    written = jax.jit(KVCache.write)(cache, tuple(new), lengths)
    assert written.layout == layout
    for layer in range(LAYERS):
        for before, after, update in (
            (cache.keys[layer], written.keys[layer], new[layer][0]),
            (cache.values[layer], written.values[layer], new[layer][1]),
        ):
            expected = by_slot(before, layout).copy()
            for b, length in enumerate(lengths):
                expected[b, length : length + TOKENS] = update[b]
            np.testing.assert_array_equal(by_slot(after, layout), expected)


def test_write_casts_to_the_cache():
    cache = filled("BKSD")
    cache = KVCache(
        tuple(k.astype("bfloat16") for k in cache.keys),
        tuple(v.astype("bfloat16") for v in cache.values),
        "BKSD",
    )
    new = jnp.full((BATCH, 1, TINY.num_kv_heads, TINY.head_dim), 1 / 3)
    written = cache.write(((new, new), (new, new)), jnp.zeros(BATCH, jnp.int32))
    assert written.keys[1].dtype == jnp.bfloat16
    assert (written.values[1][:, :, 0] == jnp.bfloat16(1 / 3)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grow_keeps_the_contents(layout):
    cache = filled(layout)
    grown = cache.grow(CAPACITY + 5)
    assert (grown.capacity, grown.batch) == (CAPACITY + 5, BATCH)
    for before, after in zip(cache.keys + cache.values, grown.keys + grown.values):
        np.testing.assert_array_equal(by_slot(after, layout)[:, :CAPACITY], by_slot(before, layout))
        assert (by_slot(after, layout)[:, CAPACITY:] == 0).all()  # finite: see cache_attention


def test_a_cache_does_not_shrink():
    with pytest.raises(ValueError, match="cannot shrink a cache of 9 slots to 8"):
        filled("BKSD").grow(CAPACITY - 1)


def test_axes_follow_the_layout():
    assert cache_axes("BKSD") == ("batch", "kv_heads", None, None)
    assert cache_axes("BSKD") == ("batch", None, "kv_heads", None)
