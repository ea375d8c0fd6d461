"""The step's own attention, and its merge with the cache's: together one softmax over everything."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_attention import cache_attention
from sv_jax.model.attention import merge_attention, step_attention
from sv_jax.speculation.tree import ancestor_mask, node_depths

CAPACITY, DIM, SCALE = 10, 8, 0.4
CHAIN = [-1, 0, 1, 2]
FORK = [-1, 0, 0, 2]
WITH_EMPTY_SLOT = [-1, 0, -1, 1]


def one_softmax(q, k, v, mask):
    """q [T, H, D], k and v [N, K, D], mask [T, N] -> [T, H, D] in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,nhd->thn", q, k) * SCALE
    weights = np.where(mask[:, None, :], np.exp(scores), 0)
    return np.einsum("thn,nhd->thd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("parents", [CHAIN, FORK, WITH_EMPTY_SLOT])
def test_merge_is_one_softmax(parents, window):
    lengths = np.array([0, 1, 6, CAPACITY], np.int32)
    batch, num_tokens = len(lengths), len(parents)
    rng = np.random.default_rng(1)
    q = 2 * rng.normal(size=(batch, num_tokens, 6, DIM))
    k, v = (rng.normal(size=(batch, num_tokens, 2, DIM)) for _ in range(2))
    k_cache, v_cache = (rng.normal(size=(batch, CAPACITY, 2, DIM)) for _ in range(2))
    mask = np.asarray(ancestor_mask(jnp.array([parents] * batch)))
    positions = lengths[:, None] + np.asarray(node_depths(jnp.asarray(mask)))

    step_mask = mask
    if window is not None:
        step_mask = mask & (positions[:, :, None] - positions[:, None, :] < window)
    single = [jnp.asarray(x, jnp.float32) for x in (q, k, v, k_cache, v_cache)]
    caches = (jnp.swapaxes(x, 1, 2) for x in single[3:])
    over_cache = cache_attention(single[0], *caches, lengths, positions, window=window, scale=SCALE)
    among_step = step_attention(*single[:3], jnp.asarray(step_mask), scale=SCALE)
    merged = merge_attention([over_cache, among_step])

    for b, length in enumerate(lengths):
        slots = np.arange(CAPACITY)
        seen = np.tile(slots < length, (num_tokens, 1))
        if window is not None:
            seen &= slots > positions[b][:, None] - window
        expected = one_softmax(
            q[b],
            np.concatenate([k_cache[b], k[b]]),
            np.concatenate([v_cache[b], v[b]]),
            np.concatenate([seen, step_mask[b]], axis=1),
        )
        np.testing.assert_allclose(merged[b], expected, atol=2e-5)


def test_a_part_without_positions_weighs_nothing():
    out = jnp.ones((1, 1, 2, 4))
    poison = jnp.full((1, 1, 2, 4), 7.0)
    nothing = jnp.full((1, 1, 2), -jnp.inf)
    merged = merge_attention([(poison, nothing), (out, jnp.zeros((1, 1, 2)))])
    np.testing.assert_array_equal(merged, out)
