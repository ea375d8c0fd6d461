"""Plain-XLA cache attention: the semantics, and what every platform can run."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.platform import Layout

KEYS_LEFT_ROWS = 128


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """float32 means float32, also on hardware whose default would multiply in bfloat16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def masked_softmax(
    scores: jax.Array, mask: jax.Array, axis: int = -1
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unnormalised weights, their sum and the log-sum-exp of float32 scores over an axis (it stays, as 1).

    Where the mask is empty along the axis: weights 0, sum 0 and lse -inf, never NaN.
    """
    scores = jnp.where(mask, scores, -jnp.inf)
    peak = jnp.max(scores, axis=axis, keepdims=True)
    finite_peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(scores - finite_peak)
    total = jnp.sum(weights, axis=axis, keepdims=True)
    lse = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1.0)) + finite_peak, -jnp.inf)
    return weights, total, lse


def cache_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    *,
    layout: Layout,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.cache_attention.cache_attention`."""
    batch, num_tokens, num_heads, head_dim = q.shape
    kv_axis, position_axis = layout.index("K"), layout.index("S")
    kv_heads, capacity = k_cache.shape[kv_axis], k_cache.shape[position_axis]
    group = num_heads // kv_heads
    precision = matmul_precision(k_cache.dtype)

    # One batched product over (B, K): per-head products or an online softmax cost 1.5 to 4 times as much
    # on CPU. The G query heads of a KV head and the T tokens share its keys as R = G*T rows of one matrix.
    rows = jnp.transpose(q.reshape(batch, num_tokens, kv_heads, group, head_dim), (0, 2, 3, 1, 4))
    rows = rows.reshape(batch, kv_heads, group * num_tokens, head_dim)
    # For the few rows of a step the keys go on the left, which was 1.2 to 1.3 times as fast on CPU at 8k
    # positions; for prefill chunks it is no faster. (Position-major caches, which are not CPU's, stay on the
    # right: XLA's CPU client has no such product in bfloat16.)
    keys_left = group * num_tokens <= KEYS_LEFT_ROWS and layout == "BKSD"
    position, row = (2, 3) if keys_left else (3, 2)
    batched = ((0, kv_axis), (0, 1)) if keys_left else ((0, 1), (0, kv_axis))
    operands = (k_cache, rows) if keys_left else (rows, k_cache)
    scores = jax.lax.dot_general(
        *operands, (((3,), (3,)), batched), precision=precision, preferred_element_type=jnp.float32
    )  # [B, K, S, R] or [B, K, R, S]
    slots = jnp.arange(capacity, dtype=jnp.int32)
    mask = jnp.expand_dims((slots < lengths[:, None])[:, None], row)
    if window is not None:
        in_window = slots > positions[:, :, None] - window  # [B, T, S]
        in_window = jnp.tile(in_window, (1, group, 1))[:, None]
        mask = mask & (jnp.swapaxes(in_window, 2, 3) if keys_left else in_window)
    weights, total, lse = masked_softmax(scores * scale, mask, axis=position)
    out = jax.lax.dot_general(
        weights.astype(v_cache.dtype),
        v_cache,
        (((position,), (position_axis,)), ((0, 1), (0, kv_axis))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )  # [B, K, R, D]
    total, lse = (jnp.squeeze(x, position)[..., None] for x in (total, lse))
    out = out / jnp.where(total > 0, total, 1.0)

    def by_token(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, kv_heads, group, num_tokens, x.shape[-1])
        return jnp.transpose(x, (0, 3, 1, 2, 4)).reshape(batch, num_tokens, num_heads, x.shape[-1])

    return by_token(out), by_token(lse)[..., 0]
