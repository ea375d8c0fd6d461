"""Plain-XLA cache attention: the semantics, and what every platform can run."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.packing import collect_rows, spread_rows

FEW_ROWS = 8  # query rows per KV head of a plain step
STEP_ROWS = 128  # query rows per KV head, G * T, up to which all positions are multiplied at once
TILE_BYTES = 8 << 20  # float32 scores of one block of positions: they stay in the caches
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 512

Partial = tuple[jax.Array, jax.Array, jax.Array]
"""Largest score [.., R, 1], sum of exponentials [.., R, 1] and weighted values [.., R, D] so far."""


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """float32 means float32, also on hardware whose default would multiply in bfloat16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def masked_softmax(
    scores: jax.Array, mask: jax.Array, axis: int = -1
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unnormalised weights, their sum and the log-sum-exp of float32 scores over an axis (it stays, as 1).

    Where the mask is empty along the axis: weights 0, sum 0 and lse -inf, never NaN.
    """
    # Added, not selected: the small array of zeros and infinities is made once for all layers of a step.
    scores = scores + jnp.where(mask, 0.0, -jnp.inf)
    peak = jnp.max(scores, axis=axis, keepdims=True)
    finite_peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(scores - finite_peak)
    total = jnp.sum(weights, axis=axis, keepdims=True)
    lse = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1.0)) + finite_peak, -jnp.inf)
    return weights, total, lse


def to_rows(q: jax.Array, kv_heads: int) -> jax.Array:
    """q [B, T, H, D] -> [B, K, R, D]: the G query heads of a KV head and the T tokens share its keys as
    R = G*T rows of one matrix."""
    batch, num_tokens, num_heads, head_dim = q.shape
    grouped = q.reshape(batch, num_tokens, kv_heads, num_heads // kv_heads, head_dim)
    return jnp.transpose(grouped, (0, 2, 3, 1, 4)).reshape(batch, kv_heads, -1, head_dim)


def from_rows(x: jax.Array, num_tokens: int) -> jax.Array:
    """[B, K, R, N] -> [B, T, H, N]."""
    batch, kv_heads, _, size = x.shape
    x = x.reshape(batch, kv_heads, -1, num_tokens, size)
    return jnp.transpose(x, (0, 3, 1, 2, 4)).reshape(batch, num_tokens, -1, size)


def cache_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    *,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.cache_attention.cache_attention`."""
    num_tokens, group = q.shape[1], k_cache.shape[3] // q.shape[3]
    rows = spread_rows(to_rows(q, group * k_cache.shape[1]), group)
    attend = _attend_at_once if rows.shape[2] <= STEP_ROWS else _attend_by_blocks
    row_positions = jnp.tile(positions, (1, rows.shape[2] // num_tokens))  # [B, R]
    out, lse = attend(rows, k_cache, v_cache, lengths, row_positions, window=window, scale=scale)
    lse = lse.reshape(*lse.shape[:1], group * lse.shape[1], -1, 1)
    return from_rows(collect_rows(out, group), num_tokens), from_rows(lse, num_tokens)[..., 0]


def _attend_at_once(
    rows: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    *,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """The few rows of a step: rows [B, K, R, D], positions [B, R] -> out [B, K, R, D], lse [B, K, R, 1]."""
    slots = jnp.arange(k_cache.shape[2], dtype=jnp.int32)
    mask = (slots < lengths[:, None])[:, None, None]  # [B, 1, 1, S]
    if window is not None:
        mask = mask & (slots > positions[:, :, None] - window)[:, None]
    return attend_rows(rows, k_cache, v_cache, mask, scale=scale)


def attend_rows(
    rows: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Attention of R rows per KV head over all S positions given.

    One batched product over (B, K): per-head products or an online softmax cost 1.5 to 4 times as much on
    CPU.

    Args:
      rows: [B, K, R, D]. keys, values: [B, K, S, D], finite wherever the mask is False, too.
      mask: bool, broadcastable to [B, K, R, S].

    Returns:
      out float32[B, K, R, D], lse float32[B, K, R, 1].
    """
    precision = matmul_precision(keys.dtype)
    # On CPU keys on the left are up to 1.3 times as fast for a verify step, and 1.4 times slower for the rows
    # of a plain one.
    keys_left = rows.shape[2] > FEW_ROWS
    position = 2 if keys_left else 3
    operands = (keys, rows) if keys_left else (rows, keys)
    scores = jax.lax.dot_general(
        *operands, (((3,), (3,)), ((0, 1), (0, 1))), precision=precision, preferred_element_type=jnp.float32
    )  # [B, K, S, R] or [B, K, R, S]
    mask = jnp.swapaxes(mask, 2, 3) if keys_left else mask
    weights, total, lse = masked_softmax(scores * scale, mask, axis=position)
    out = jax.lax.dot_general(
        weights.astype(values.dtype),
        values,
        (((position,), (2,)), ((0, 1), (0, 1))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )  # [B, K, R, D]
    total, lse = (jnp.squeeze(x, position)[..., None] for x in (total, lse))
    return out / jnp.where(total > 0, total, 1.0), lse


def block_of_positions(rows: int, capacity: int) -> int:
    """Positions of a block for `rows` rows of scores (over batch and heads): a power of two that divides
    `capacity` as far as it can, with the scores within TILE_BYTES."""
    block = LARGEST_BLOCK
    while block > SMALLEST_BLOCK and 4 * rows * block > TILE_BYTES:
        block //= 2
    while capacity % block:
        block //= 2
    return block


def _attend_by_blocks(
    rows: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    *,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """The many rows of a prefill chunk, as `_attend_at_once`: block by block, with an online softmax.

    Scores of all positions at once would not fit any cache: on CPU that took 2.4 times as long at 4k. Only
    blocks that some row attends to are visited, so the cost follows lengths (and windows), not capacity.
    Blocks that lie within every length need no mask; the rest goes in smaller ones.
    """
    block = block_of_positions(rows.shape[0] * rows.shape[1] * rows.shape[2], k_cache.shape[2])
    product = partial(
        jax.lax.dot_general, precision=matmul_precision(k_cache.dtype), preferred_element_type=jnp.float32
    )
    exact = rows.dtype == jnp.float32  # a rounded product would lose bits of a bfloat16 query
    rows = rows * scale if exact else rows

    def seen(slots: jax.Array) -> jax.Array:
        mask = (slots < lengths[:, None])[:, None, None]
        if window is not None:
            mask = mask & (slots > positions[:, :, None] - window)[:, None]
        return mask

    def attend(i: jax.Array, carry: Partial, size: int, masked: bool) -> Partial:
        peak, total, out = carry
        k, v = (jax.lax.dynamic_slice_in_dim(x, i * size, size, 2) for x in (k_cache, v_cache))
        scores = product(rows, k, (((3,), (3,)), ((0, 1), (0, 1))))  # [B, K, R, size]
        scores = scores if exact else scores * scale
        if masked:
            scores = jnp.where(seen(i * size + jnp.arange(size, dtype=jnp.int32)), scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
        reference = jnp.where(jnp.isfinite(new_peak), new_peak, 0.0)  # nothing seen yet: no NaN
        weights = jnp.exp(scores - reference)
        shrink = jnp.exp(peak - reference)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        values = product(weights.astype(v.dtype), v, (((3,), (2,)), ((0, 1), (0, 1))))
        return new_peak, total, out * shrink + values

    nothing = jnp.zeros((*rows.shape[:3], 1), jnp.float32)
    carry = (nothing - jnp.inf, nothing, jnp.zeros(rows.shape, jnp.float32))
    small = max(1, block // 2)
    first = jnp.zeros((), jnp.int32)
    if window is None:
        within = jnp.min(lengths) // block
        carry = jax.lax.fori_loop(0, within, partial(attend, size=block, masked=False), carry)
        first = within * (block // small)
    else:
        first = jnp.maximum(jnp.min(positions) - window + 1, 0) // small
    last = (jnp.max(lengths) + small - 1) // small
    peak, total, out = jax.lax.fori_loop(first, last, partial(attend, size=small, masked=True), carry)
    some = total > 0
    lse = jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + peak, -jnp.inf)
    return out / jnp.where(some, total, 1.0), lse
