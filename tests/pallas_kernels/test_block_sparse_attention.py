"""Block-sparse attention: against dense attention, against a loop in float64, and what it must not read."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.cache_attention import cache_attention
from pallas_kernels.cache_attention.reference import STEP_ROWS
from pallas_kernels.packing import pack_heads

BLOCK, BLOCKS = 4, 6
CAPACITY = BLOCK * BLOCKS
EDGES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, CAPACITY - 1, CAPACITY]
GARBAGE = np.array([2**31 - 1, -1, -(2**31), 0, BLOCKS, 1], np.int32)  # what lies past the count
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def naive(q, k, v, indices, counts, lengths, *, positions, block_size=BLOCK, window=None, scale=None):
    """q [B, T, H, D], k and v [B, S, K, D] -> out [B, T, H, D] and lse [B, T, H], one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, t, h in np.ndindex(q.shape[:3]):
        head = h // group
        blocks = indices[b, head, : counts[b, head]]
        slots = [n * block_size + i for n in blocks for i in range(block_size)]
        seen = [s for s in slots if s < lengths[b] and (window is None or s > positions[b, t] - window)]
        if seen:
            scores = k[b, seen, head] @ q[b, t, h] * scale
            lse[b, t, h] = np.log(np.sum(np.exp(scores)))
            out[b, t, h] = np.exp(scores - lse[b, t, h]) @ v[b, seen, head]
    return out, lse


def tensors(lengths, *, heads=6, kv_heads=2, num_tokens=3, dim=8, capacity=CAPACITY, dtype="float32", seed=0):
    """q, k, v [B, S, K, D], lengths and positions; scores reach about 10: softmax is far from flat."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    q = jnp.asarray(3 * rng.normal(size=(batch, num_tokens, heads, dim)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(batch, capacity, kv_heads, dim)), dtype) for _ in range(2))
    lengths = np.array(lengths, np.int32)
    return q, k, v, lengths, lengths[:, None] + np.arange(num_tokens, dtype=np.int32)


def random_blocks(batch, kv_heads, *, blocks=BLOCKS, seed=0):
    """Some blocks for each KV head, in any order, and garbage past their number (0 .. all of them)."""
    rng = np.random.default_rng(seed)
    indices = np.array([[rng.permutation(blocks) for _ in range(kv_heads)] for _ in range(batch)], np.int32)
    counts = rng.integers(0, blocks + 1, (batch, kv_heads)).astype(np.int32)
    past = np.arange(blocks) >= counts[..., None]
    return np.where(past, np.resize(GARBAGE, blocks), indices), counts


def chosen_slots(indices, counts, block_size=BLOCK, capacity=CAPACITY):
    """bool[B, S, K]: slots of selected blocks."""
    chosen = np.zeros((indices.shape[0], capacity, indices.shape[1]), bool)
    for b, head in np.ndindex(counts.shape):
        for n in indices[b, head, : counts[b, head]]:
            chosen[b, n * block_size : (n + 1) * block_size, head] = True
    return chosen


@partial(jax.jit, static_argnames=("packed", "block_size", "window", "scale", "implementation"))
def run(q, k, v, indices, counts, lengths, *, packed=False, block_size=BLOCK, **options):
    group = k.shape[2] if packed else 1
    k, v = pack_heads(k, group), pack_heads(v, group)
    return block_sparse_attention(q, k, v, indices, counts, lengths, block_size=block_size, **options)


@partial(jax.jit, static_argnames=("packed", "window"))
def run_dense(q, k, v, lengths, positions, *, packed, window=None):
    group = k.shape[2] if packed else 1
    k, v = pack_heads(k, group), pack_heads(v, group)
    return cache_attention(q, k, v, lengths, positions, window=window)


def check(result, expected, tolerance=TOLERANCE["float32"]):
    for got, want in zip(result, expected):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


def check_same_bits(before, after):
    for a, b in zip(before, after):
        assert not np.isnan(a).any()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)])
def test_selected_blocks_and_no_others(packed, heads, kv_heads):
    """Every KV head has its own set, of every size from 0 to all; rows have lengths around block edges."""
    q, k, v, lengths, positions = tensors(EDGES, heads=heads, kv_heads=kv_heads)
    indices, counts = random_blocks(len(EDGES), kv_heads)
    for window in (None, BLOCK + 1) if not packed else (1, CAPACITY):
        result = run(q, k, v, indices, counts, lengths, packed=packed, window=window, positions=positions)
        check(result, naive(q, k, v, indices, counts, lengths, positions=positions, window=window))


CHAIN, TREE = [0, 1, 2], [0, 1, 1, 1, 2]  # where the tokens stand behind the length


@pytest.mark.parametrize(
    ("dtype", "packed", "heads", "kv_heads", "offsets", "windowed"),
    [
        ("float32", False, 4, 2, CHAIN, False),
        ("float32", True, 2, 2, TREE, True),
        ("bfloat16", False, 2, 2, TREE, False),
        ("bfloat16", True, 4, 2, CHAIN, True),
    ],
)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_everything_selected_is_dense_attention(
    block_size, dtype, packed, heads, kv_heads, offsets, windowed
):
    """Whatever the order of the blocks; lengths around the edges of the second block and of the last one."""
    capacity = 256
    edges = [block_size, capacity - block_size]
    q, k, v, lengths, _ = tensors(
        [0, 1, *(edge + i for edge in edges for i in (-1, 0, 1)), capacity],
        heads=heads,
        kv_heads=kv_heads,
        num_tokens=len(offsets),
        capacity=capacity,
        dtype=dtype,
    )
    positions = lengths[:, None] + np.array(offsets, np.int32)
    blocks = capacity // block_size
    rng = np.random.default_rng(0)
    order = [[rng.permutation(blocks) for _ in range(kv_heads)] for _ in lengths]
    indices, counts = np.array(order, np.int32), np.full((len(lengths), kv_heads), blocks, np.int32)
    options = {"packed": packed, "window": block_size + 3 if windowed else None, "positions": positions}
    result = run(q, k, v, indices, counts, lengths, block_size=block_size, **options)
    check(result, run_dense(q, k, v, lengths, **options), 1e-5 if dtype == "float32" else TOLERANCE[dtype])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nan_in_what_is_not_selected_or_not_there_changes_no_bit(packed, dtype):
    """Unselected blocks (block 0 too, which stands in for entries past the count), and slots behind the
    length, in the partly filled block too."""
    q, k, v, lengths, positions = tensors(EDGES * 3, dtype=dtype)
    indices, counts = random_blocks(len(lengths), 2)
    alive = np.arange(CAPACITY)[None, :, None] < lengths[:, None, None]
    read = alive & chosen_slots(indices, counts)
    assert (alive & ~read).any() and not read[counts[:, 0] == 0, :, 0].any()
    poisoned = [jnp.where(read[..., None], x, jnp.nan) for x in (k, v)]
    for window in (None, 5):
        options = {"packed": packed, "window": window, "positions": positions}
        before = run(q, k, v, indices, counts, lengths, **options)
        check_same_bits(before, run(q, *poisoned, indices, counts, lengths, **options))


def test_entries_past_the_count_may_be_anything():
    q, k, v, lengths, _ = tensors(EDGES)
    indices, counts = random_blocks(len(EDGES), 2)
    past = np.arange(BLOCKS) >= counts[..., None]
    before = run(q, k, v, np.where(past, 0, indices), counts, lengths)
    for garbage in (2**31 - 1, -(2**31), -1, BLOCKS, 1):
        check_same_bits(before, run(q, k, v, np.where(past, np.int32(garbage), indices), counts, lengths))


def test_more_entries_than_blocks():
    """N may exceed the blocks of the cache, as long as no more of it count."""
    q, k, v, lengths, _ = tensors(EDGES)
    indices, counts = random_blocks(len(EDGES), 2)
    wide = np.concatenate([indices, np.full_like(indices, 2**31 - 1)], axis=-1)
    check(run(q, k, v, wide, counts, lengths), run(q, k, v, indices, counts, lengths))


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_to_attend_to(packed):
    """No block selected, an empty row, a block behind the length, a window that has passed: weight 0, never
    NaN, never the mean of V. A row and a KV head beside it that do read are as they were."""
    lengths = [9, 0, 9, 9, 9]
    q, k, v, lengths, _ = tensors(lengths)
    positions = np.array([[9, 10, 11]] * 3 + [[30, 31, 32]] + [[9, 10, 11]], np.int32)
    indices = np.broadcast_to(np.array([[0], [1], [3], [0], [0]], np.int32)[:, None], (5, 2, 1))
    counts = np.array([[0, 1], [1, 1], [1, 1], [1, 1], [1, 1]], np.int32)
    options = {"packed": packed, "window": 12, "positions": positions}
    out, lse = (np.asarray(x) for x in run(q, k, v, indices, counts, lengths, **options))
    empty = np.zeros((5, 6), bool)  # [B, H]
    empty[0, :3] = empty[1:4] = True
    assert (out.swapaxes(1, 2)[empty] == 0).all()
    assert np.isneginf(lse.swapaxes(1, 2)[empty]).all()
    assert np.isfinite(lse.swapaxes(1, 2)[~empty]).all()
    check((out, lse), naive(q, k, v, indices, counts, lengths, positions=positions, window=12))


def test_disjoint_sets_merge_to_their_union():
    """What log-sum-exp is for: two halves of the blocks, and all of them."""
    q, k, v, lengths, _ = tensors(EDGES[1:])
    batch = len(EDGES) - 1
    all_blocks = np.broadcast_to(np.arange(BLOCKS, dtype=np.int32), (batch, 2, BLOCKS))
    half = np.full((batch, 2), BLOCKS // 2, np.int32)
    parts = [run(q, k, v, blocks, half, lengths) for blocks in (all_blocks, all_blocks[..., ::-1])]
    out, lse = run(q, k, v, all_blocks, 2 * half, lengths)
    np.testing.assert_allclose(np.logaddexp(parts[0][1], parts[1][1]), lse, rtol=2e-5)
    merged = sum(np.exp(part_lse - lse)[..., None] * part for part, part_lse in parts)
    np.testing.assert_allclose(merged, out, atol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_more_tokens_than_a_step_has(packed):
    num_tokens = 1 + STEP_ROWS // 3
    q, k, v, lengths, positions = tensors([1, 7, CAPACITY], num_tokens=num_tokens)
    indices, counts = random_blocks(3, 2)
    result = run(q, k, v, indices, counts, lengths, packed=packed)
    check(result, naive(q, k, v, indices, counts, lengths, positions=positions))


@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16(packed):
    """Inputs are rounded before both; what is left is the rounding of the weights to bfloat16."""
    q, k, v, lengths, positions = tensors(EDGES, dtype="bfloat16")
    indices, counts = random_blocks(len(EDGES), 2)
    out, lse = run(q, k, v, indices, counts, lengths, packed=packed)
    expected, expected_lse = naive(q, k, v, indices, counts, lengths, positions=positions)
    check((out,), (expected,), TOLERANCE["bfloat16"])
    check((lse,), (expected_lse,))


def test_scale_and_large_scores():
    q, k, v, lengths, positions = tensors(EDGES)
    indices, counts = random_blocks(len(EDGES), 2)
    result = run(q, k, v, indices, counts, lengths, scale=0.5)
    check(result, naive(q, k, v, indices, counts, lengths, positions=positions, scale=0.5))
    out, lse = run(q * 100, k, v, indices, counts, lengths)
    assert np.isfinite(out).all() and not np.isnan(lse).any() and not np.isposinf(lse).any()


def test_float32_whatever_the_default_precision():
    """On hardware that multiplies float32 in bfloat16 by default too (a no-op on CPU)."""
    q, k, v, lengths, positions = tensors([7])
    indices, counts = random_blocks(1, 2)
    with jax.default_matmul_precision("bfloat16"):
        result = run(q, k, v, indices, counts, lengths)
    check(result, naive(q, k, v, indices, counts, lengths, positions=positions))


def test_refusals():
    q, k, v, lengths, _ = tensors([5, 6])
    indices, counts = random_blocks(2, 2)
    good = (q, k, v, indices, counts, lengths)
    with pytest.raises(
        NotImplementedError, match=r"implementation='tpu'; allowed: xla, pallas_tpu, pallas_tpu_interp"
    ):
        run(*good, implementation="tpu")
    with pytest.raises(ValueError, match=r"block_size=5 does not divide a cache of 24 positions"):
        run(*good, block_size=5)
    with pytest.raises(ValueError, match=r"block_size=0 does not divide"):
        run(*good, block_size=0)
    with pytest.raises(ValueError, match=r"window=3 needs positions"):
        run(*good, window=3)
    for bad_q, bad_k, bad_v in [(q[:, :, :5], k, v), (q[..., :4], k, v), (q, k, v[:, :-1])]:
        with pytest.raises(ValueError, match="do not fit each other"):
            run(bad_q, bad_k, bad_v, indices, counts, lengths)
    for bad_indices, bad_counts in [
        (indices[:1], counts[:1]),
        (indices[:, :1], counts),
        (indices, counts.T[:1]),
    ]:
        with pytest.raises(ValueError, match=r"block_indices .*; allowed: \(2, 2, N\) and \(2, 2\)"):
            run(q, k, v, bad_indices, bad_counts, lengths)


def test_named_implementation_is_the_default_here():
    q, k, v, lengths, _ = tensors(EDGES)
    arguments = (q, k, v, *random_blocks(len(EDGES), 2), lengths)
    check_same_bits(run(*arguments), run(*arguments, implementation="xla"))
