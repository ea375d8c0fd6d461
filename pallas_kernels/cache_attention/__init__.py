"""Attention of the T tokens of a step over the committed KV cache: every position, or a sliding window.

The dense sibling of block-sparse attention: same arguments and results, nothing selected. It is plain XLA;
where a kernel runs verify steps, dense ones are that kernel with every block.
"""

from __future__ import annotations

import jax

from pallas_kernels.cache_attention import reference
from pallas_kernels.packing import check_shapes


def cache_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends to cached positions s < lengths[b], and s > positions[b, t] - window where there is one.

    Args:
      q: [B, T, H, D] queries after RoPE; query head h reads KV head h // (H // K).
      k_cache, v_cache: [B, K / p, S, p * D], p heads side by side (`packing`; 1 where W = D).
      lengths: int32[B], committed tokens per row; what lies behind is not read into the result. It must
        be finite, though: the dense product multiplies it by a weight of zero.
      positions: int32[B, T], absolute position of each query (used by the window alone).
      window: positions that a query sees, its own included; None for all.
      scale: factor on q . k; None for 1 / sqrt(D).

    Returns:
      out: float32[B, T, H, D], softmax-weighted V over the attended positions, 0 where there are none.
      lse: float32[B, T, H], log of the sum of exponentials of the scores, -inf where there are none.

    Raises:
      ValueError: shapes that do not fit.
    """
    check_shapes(q, k_cache, v_cache)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return reference.cache_attention(q, k_cache, v_cache, lengths, positions, window=window, scale=scale)
