"""Attention of the T tokens of a step over selected blocks of the committed KV cache.

Which blocks is decided outside, as small arrays; this only walks them. With every block selected it is
`cache_attention`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import reference, tpu
from pallas_kernels.packing import check_shapes
from pallas_kernels.platform import IMPLEMENTATIONS, attention_implementation


def pick_implementation(
    name: str | None,
    platform: str,
    q_shape: tuple[int, ...],
    cache_shape: tuple[int, ...],
    dtype: jnp.dtype,
    *,
    block_size: int,
    entries: int,
) -> str:
    """Which of IMPLEMENTATIONS runs: the named one, or for None the platform's if it takes these shapes.

    Args:
      q_shape: [B, T, H, D], cache_shape: [B, K / p, S, p * D], of one device.
      entries: N, the most blocks of a KV head.

    Raises:
      NotImplementedError: an unknown name, or a named one that does not take these shapes.
    """
    if name not in (None, *IMPLEMENTATIONS):
        raise NotImplementedError(f"implementation={name!r}; allowed: {', '.join(IMPLEMENTATIONS)}")
    wanted = name or attention_implementation(platform)
    if wanted == "xla":
        return wanted
    try:
        tpu.check_supported(q_shape, cache_shape, dtype, block_size=block_size, entries=entries)
    except NotImplementedError:
        if name is not None:
            raise
        return "xla"
    return wanted


def block_sparse_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_indices: jax.Array,
    num_blocks: jax.Array,
    lengths: jax.Array,
    *,
    block_size: int,
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
      k_cache, v_cache: [B, K / p, S, p * D], p heads side by side (`packing`). Positions that are not
        selected, or lie at or behind a row's length, may hold anything, NaN included.
      block_indices: int32[B, K, N], the first num_blocks[b, k] entries each a block of its own, below
        S / block_size; entries past the count are not read.
      num_blocks: int32[B, K], 0 .. N.
      lengths: int32[B], committed tokens per row.
      block_size: positions of a block; divides S.
      window: positions that a query sees, its own included; None for all. Needs `positions`.
      positions: int32[B, T], absolute position of each query; used by the window alone.
      scale: factor on q . k; None for 1 / sqrt(D).
      implementation: one of IMPLEMENTATIONS; None picks what the default backend runs with these shapes.

    Returns:
      out: float32[B, T, H, D], softmax-weighted V over the attended positions, 0 where there are none.
      lse: float32[B, T, H], log of the sum of exponentials of the scores, -inf where there are none.

    Raises:
      ValueError: shapes or a block size that do not fit. NotImplementedError: see
      `pick_implementation`.
    """
    kv_heads, capacity = check_shapes(q, k_cache, v_cache), k_cache.shape[2]
    if block_size < 1 or capacity % block_size:
        raise ValueError(f"block_size={block_size} does not divide a cache of {capacity} positions")
    if block_indices.shape[:2] != (q.shape[0], kv_heads) or num_blocks.shape != block_indices.shape[:2]:
        raise ValueError(
            f"block_indices {block_indices.shape} and num_blocks {num_blocks.shape}; "
            f"allowed: ({q.shape[0]}, {kv_heads}, N) and ({q.shape[0]}, {kv_heads})"
        )
    if window is not None and positions is None:
        raise ValueError(f"window={window} needs positions")
    chosen = pick_implementation(
        implementation,
        jax.default_backend(),
        q.shape,
        k_cache.shape,
        k_cache.dtype,
        block_size=block_size,
        entries=block_indices.shape[2],
    )
    attend = reference.block_sparse_attention
    if chosen != "xla":
        attend = partial(tpu.block_sparse_attention, interpret=chosen == "pallas_tpu_interpret")
    return attend(
        q,
        k_cache,
        v_cache,
        block_indices,
        num_blocks,
        lengths,
        block_size=block_size,
        window=window,
        positions=positions,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )
