"""Attention of the T tokens of a step over the committed KV cache: every position, or a sliding window.

The dense sibling of block-sparse attention: same arguments and results, nothing selected.
"""

from __future__ import annotations

import jax

from pallas_kernels.cache_attention import reference
from pallas_kernels.platform import LAYOUTS, Layout

IMPLEMENTATIONS = ("xla",)


def cache_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    *,
    layout: Layout,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends to cached positions s < lengths[b], and s > positions[b, t] - window where there is one.

    Args:
      q: [B, T, H, D] queries after RoPE; query head h reads KV head h // (H // K).
      k_cache, v_cache: [B, K, S, D] for layout "BKSD", [B, S, K, D] for "BSKD".
      lengths: int32[B], committed tokens per row; what lies behind is not read into the result. It must
        be finite, though: the dense product multiplies it by a weight of zero.
      positions: int32[B, T], absolute position of each query (used by the window alone).
      window: positions that a query sees, its own included; None for all.
      scale: factor on q . k; None for 1 / sqrt(D).
      implementation: None picks what works here; "xla" names the only one.

    Returns:
      out: float32[B, T, H, D], softmax-weighted V over the attended positions, 0 where there are none.
      lse: float32[B, T, H], log of the sum of exponentials of the scores, -inf where there are none.

    Raises:
      ValueError: shapes or layout that do not fit. NotImplementedError: an unknown implementation.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; allowed: {', '.join(LAYOUTS)}")
    if implementation not in (None, *IMPLEMENTATIONS):
        raise NotImplementedError(f"implementation={implementation!r}; allowed: {', '.join(IMPLEMENTATIONS)}")
    kv_heads = k_cache.shape[layout.index("K")]
    if k_cache.shape != v_cache.shape or q.shape[2] % kv_heads or q.shape[3] != k_cache.shape[3]:
        raise ValueError(f"q {q.shape}, k {k_cache.shape}, v {v_cache.shape} do not fit layout {layout}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return reference.cache_attention(
        q, k_cache, v_cache, lengths, positions, layout=layout, window=window, scale=scale
    )
