import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packing import unpack_heads
from sv_jax.model.cache import KVCache, cache_shape
from sv_jax.sharding import make_sharding
from tests.tiny import TINY

LAYERS, BATCH, CAPACITY, TOKENS = 2, 3, 9, 4


def filled(group=1):
    """A cache in which every number is different."""
    shape = cache_shape(TINY, BATCH, CAPACITY, group)
    size = int(np.prod(shape))
    arrays = [
        jnp.arange(i * size, (i + 1) * size, dtype=jnp.float32).reshape(shape) for i in range(2 * LAYERS)
    ]
    return KVCache(tuple(arrays[:LAYERS]), tuple(arrays[LAYERS:]))


def by_slot(array):
    """[B, S, K, D], however heads lie."""
    return np.array(jnp.swapaxes(unpack_heads(array, TINY.head_dim), 1, 2))


@pytest.mark.parametrize("group", [1, 2])
def test_write_puts_each_row_at_its_own_length(group):
    cache = filled(group)
    lengths = np.array([0, 3, CAPACITY - TOKENS], np.int32)
    shape = (BATCH, TOKENS, TINY.num_kv_heads, TINY.head_dim)
    rng = np.random.default_rng(0)
    new = [tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in "kv") for _ in range(LAYERS)]
    written = jax.jit(KVCache.write, static_argnums=3)(cache, tuple(new), lengths, make_sharding(TINY))
    for layer in range(LAYERS):
        for before, after, update in (
            (cache.keys[layer], written.keys[layer], new[layer][0]),
            (cache.values[layer], written.values[layer], new[layer][1]),
        ):
            expected = by_slot(before).copy()
            for b, length in enumerate(lengths):
                expected[b, length : length + TOKENS] = update[b]
            np.testing.assert_array_equal(by_slot(after), expected)


def test_write_casts_to_the_cache():
    cache = filled()
    cache = KVCache(
        tuple(k.astype("bfloat16") for k in cache.keys),
        tuple(v.astype("bfloat16") for v in cache.values),
    )
    new = jnp.full((BATCH, 1, TINY.num_kv_heads, TINY.head_dim), 1 / 3)
    written = cache.write(((new, new), (new, new)), jnp.zeros(BATCH, jnp.int32), make_sharding(TINY))
    assert written.keys[1].dtype == jnp.bfloat16
    assert (written.values[1][:, :, 0] == jnp.bfloat16(1 / 3)).all()


@pytest.mark.parametrize("group", [1, 2])
def test_grow_keeps_the_contents(group):
    cache = filled(group)
    grown = cache.grow(CAPACITY + 5)
    assert (grown.capacity, grown.batch) == (CAPACITY + 5, BATCH)
    for before, after in zip(cache.keys + cache.values, grown.keys + grown.values):
        np.testing.assert_array_equal(by_slot(after)[:, :CAPACITY], by_slot(before))
        assert (by_slot(after)[:, CAPACITY:] == 0).all()  # finite: see cache_attention


def test_a_cache_does_not_shrink():
    with pytest.raises(ValueError, match="cannot shrink a cache of 9 slots to 8"):
        filled().grow(CAPACITY - 1)
