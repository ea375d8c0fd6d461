"""Cache attention against a loop in float64 that follows the docstring word by word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_attention import cache_attention
from pallas_kernels.cache_attention.reference import STEP_ROWS, block_of_positions
from pallas_kernels.packing import pack_heads

CAPACITY = 12


def naive(q, k, v, lengths, positions, *, window=None, scale=None):
    """q [B, T, H, D], k and v [B, S, K, D] -> out [B, T, H, D] and lse [B, T, H], one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, num_tokens, heads, dim = q.shape
    group = heads // k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, t, h in np.ndindex(batch, num_tokens, heads):
        seen = [s for s in range(lengths[b]) if window is None or s > positions[b, t] - window]
        if seen:
            scores = k[b, seen, h // group] @ q[b, t, h] * scale
            lse[b, t, h] = np.log(np.sum(np.exp(scores)))
            out[b, t, h] = np.exp(scores - lse[b, t, h]) @ v[b, seen, h // group]
    return out, lse


def inputs(*, lengths, heads=6, kv_heads=2, num_tokens=3, dim=8, dtype="float32", seed=0):
    """Arguments with the cache as [B, S, K, D]; scores reach about 10, so that softmax is far from flat."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    q = jnp.asarray(3 * rng.normal(size=(batch, num_tokens, heads, dim)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(batch, CAPACITY, kv_heads, dim)), dtype) for _ in range(2))
    lengths = np.array(lengths, np.int32)
    positions = lengths[:, None] + np.arange(num_tokens, dtype=np.int32)
    return q, k, v, lengths, positions


def run(q, k, v, lengths, positions, packed, **options):
    group = k.shape[2] if packed else 1
    k, v = pack_heads(k, group), pack_heads(v, group)
    return cache_attention(q, k, v, lengths, positions, **options)


def check(result, expected, tolerance=2e-5):
    for got, want in zip(result, expected):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1), (9, 3)])
def test_ragged_lengths_and_groups(packed, heads, kv_heads):
    arguments = inputs(lengths=[0, 1, 7, CAPACITY], heads=heads, kv_heads=kv_heads)
    check(run(*arguments, packed), naive(*arguments))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [[0, 1, CAPACITY], [3, 4, 5], [0, 0, 0]])
def test_many_tokens_go_block_by_block(packed, dtype, lengths):
    """A prefill chunk has more query rows than a step: positions are visited in blocks of 4 here."""
    assert block_of_positions(1, CAPACITY) == 4
    num_tokens = 1 + STEP_ROWS // 3
    arguments = inputs(lengths=lengths, num_tokens=num_tokens, dtype=dtype)
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    check(run(*arguments, packed), naive(*arguments), tolerance)
    for window in (1, 5, 50):  # the last queries of a narrow one see nothing of the cache
        check(run(*arguments, packed, window=window), naive(*arguments, window=window), tolerance)


def test_blocks_behind_every_length_are_not_read():
    """Not even NaN there shows; nor before every window."""
    num_tokens = 1 + STEP_ROWS // 3
    q, k, v, lengths, positions = inputs(lengths=[2, 8], num_tokens=num_tokens)
    expected = naive(q, k, v, lengths, positions)
    dead = np.zeros(CAPACITY, bool)
    dead[8:] = True
    poisoned = (jnp.where(dead[:, None, None], jnp.nan, x) for x in (k, v))
    check(run(q, *poisoned, lengths, positions, False), expected)


@pytest.mark.parametrize(
    ("rows", "capacity", "block"),
    [
        (1, 8192, 512),
        (2304, 8192, 512),
        (4608, 8192, 256),
        (9216, 512, 128),
        (10**6, 8192, 64),
        (1, 640, 128),
        (1, 12, 4),
        (1, 7, 1),
    ],
)
def test_block_sizes(rows, capacity, block):
    assert block_of_positions(rows, capacity) == block


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, CAPACITY, 100])
def test_windows(packed, window):
    arguments = inputs(lengths=[0, 1, 7, CAPACITY])
    check(run(*arguments, packed, window=window), naive(*arguments, window=window))


def test_window_follows_positions_of_siblings():
    """In a tree two queries may stand at one position: the window is counted from it, not from t."""
    q, k, v, lengths, _ = inputs(lengths=[7, 9])
    positions = lengths[:, None] + np.array([0, 1, 1], np.int32)
    arguments = (q, k, v, lengths, positions)
    check(run(*arguments, False, window=4), naive(*arguments, window=4))


@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16(packed):
    """Inputs are rounded before both; what is left is the rounding of the weights to bfloat16."""
    arguments = inputs(lengths=[1, 7, CAPACITY], dtype="bfloat16")
    out, lse = run(*arguments, packed)
    expected, expected_lse = naive(*arguments)
    check((out,), (expected,), tolerance=2e-2)
    check((lse,), (expected_lse,), tolerance=2e-5)


def test_scale():
    arguments = inputs(lengths=[5])
    check(run(*arguments, False, scale=0.5), naive(*arguments, scale=0.5))


def test_large_scores_do_not_overflow():
    q, k, v, lengths, positions = inputs(lengths=[6])
    out, lse = run(q * 100, k, v, lengths, positions, False)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_nothing_to_attend_to(packed, window):
    """Length 0, or everything outside of the window: weight 0, never NaN, never the mean of V."""
    q, k, v, lengths, _ = inputs(lengths=[0, 4])
    positions = np.array([[0, 1, 2], [6, 7, 8]], np.int32)
    out, lse = run(q, k, v, lengths, positions, packed, window=window)
    empty = [0] if window is None else [0, 1]
    assert (np.asarray(out)[empty] == 0).all()
    assert np.isneginf(np.asarray(lse)[empty]).all()


@pytest.mark.parametrize("packed", [False, True])
def test_slots_behind_the_length_do_not_count(packed):
    q, k, v, lengths, positions = inputs(lengths=[0, 5])
    dead = np.arange(CAPACITY)[None, :, None, None] >= lengths[:, None, None, None]
    poisoned = [jnp.where(dead, 1e4, x) for x in (k, v)]
    before = run(q, k, v, lengths, positions, packed)
    after = run(q, *poisoned, lengths, positions, packed)
    for a, b in zip(before, after):
        np.testing.assert_array_equal(a, b)


def test_float32_whatever_the_default_precision():
    """On hardware that multiplies float32 in bfloat16 by default too (a no-op on CPU)."""
    arguments = inputs(lengths=[7])
    with jax.default_matmul_precision("bfloat16"):
        check(jax.jit(lambda *a: run(*a, False))(*arguments), naive(*arguments))


def test_refusals():
    q, k, v, lengths, positions = inputs(lengths=[5, 6])
    for bad_q, bad_k, bad_v in [
        (q[:, :, :5], k, v),  # 5 query heads over 2 KV heads
        (q[..., :4], k, v),  # head_dim
        (q, k, v[:, :-1]),  # another capacity
    ]:
        with pytest.raises(ValueError, match="do not fit each other"):
            run(bad_q, bad_k, bad_v, lengths, positions, False)
