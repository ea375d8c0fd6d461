"""Attention of the T tokens of a step over selected blocks of the committed KV cache.

Which blocks is decided outside, as small arrays; this only walks them. With every block selected it is
`cache_attention`.
"""

from __future__ import annotations

import jax

from pallas_kernels.block_sparse_attention import reference
from pallas_kernels.platform import LAYOUTS, Layout

IMPLEMENTATIONS = ("xla",)


def block_sparse_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_indices: jax.Array,
    num_blocks: jax.Array,
    lengths: jax.Array,
    *,
    block_size: int,
    layout: Layout,
    window: int | None = None,
    positions: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends to the positions s < lengths[b] that lie in the selected blocks of the KV head.

    Block n holds positions n * block_size .. (n + 1) * block_size - 1. All T tokens and all query heads of a
    KV head read the same blocks (arXiv 2512.21911, inter-draft-token reuse).

    Args:
      q: [B, T, H, D] queries after RoPE; query head h reads KV head h // (H // K).
      k_cache, v_cache: [B, K, S, D] for layout "BKSD", [B, S, K, D] for "BSKD". Positions that are not
        selected, or lie at or behind a row's length, may hold anything, NaN included.
      block_indices: int32[B, K, N], the first num_blocks[b, k] entries each a block of its own, below
        S / block_size; entries past the count are not read.
      num_blocks: int32[B, K], 0 .. N.
      lengths: int32[B], committed tokens per row.
      block_size: positions of a block; divides S.
      window: positions that a query sees, its own included; None for all. Needs `positions`.
      positions: int32[B, T], absolute position of each query; used by the window alone.
      scale: factor on q . k; None for 1 / sqrt(D).
      implementation: None picks what works here; "xla" names the only one.

    Returns:
      out: float32[B, T, H, D], softmax-weighted V over the attended positions, 0 where there are none.
      lse: float32[B, T, H], log of the sum of exponentials of the scores, -inf where there are none.

    Raises:
      ValueError: shapes, layout or block size that do not fit. NotImplementedError: an unknown
      implementation.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; allowed: {', '.join(LAYOUTS)}")
    if implementation not in (None, *IMPLEMENTATIONS):
        raise NotImplementedError(f"implementation={implementation!r}; allowed: {', '.join(IMPLEMENTATIONS)}")
    kv_heads, capacity = (k_cache.shape[layout.index(axis)] for axis in "KS")
    if k_cache.shape != v_cache.shape or q.shape[2] % kv_heads or q.shape[3] != k_cache.shape[3]:
        raise ValueError(f"q {q.shape}, k {k_cache.shape}, v {v_cache.shape} do not fit layout {layout}")
    if block_size < 1 or capacity % block_size:
        raise ValueError(f"block_size={block_size} does not divide a cache of {capacity} positions")
    if block_indices.shape[:2] != (q.shape[0], kv_heads) or num_blocks.shape != block_indices.shape[:2]:
        raise ValueError(
            f"block_indices {block_indices.shape} and num_blocks {num_blocks.shape}; "
            f"allowed: ({q.shape[0]}, {kv_heads}, N) and ({q.shape[0]}, {kv_heads})"
        )
    if window is not None and positions is None:
        raise ValueError(f"window={window} needs positions")
    return reference.block_sparse_attention(
        q,
        k_cache,
        v_cache,
        block_indices,
        num_blocks,
        lengths,
        block_size=block_size,
        layout=layout,
        window=window,
        positions=positions,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )
