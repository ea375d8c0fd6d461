"""Plain-XLA block-sparse attention: the semantics, and what every platform can run."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cache_attention.reference import attend_rows, from_rows, to_rows
from pallas_kernels.platform import Layout


def gather_blocks(
    cache: jax.Array, block_indices: jax.Array, *, block_size: int, layout: Layout
) -> jax.Array:
    """Copies the blocks of each KV head next to each other: -> [B, K, N * block_size, D].

    A copy of few blocks stays in the processor's caches, and what follows is one batched product: on CPU that
    is twice as fast as a product a block.
    """

    def block(head: jax.Array, index: jax.Array) -> jax.Array:  # [S, D] -> [block_size, D]
        return jax.lax.dynamic_slice_in_dim(head, index * block_size, block_size)

    of_head = jax.vmap(block, (None, 0))
    of_row = jax.vmap(of_head, (layout.index("K") - 1, 0))
    gathered = jax.vmap(of_row)(cache, block_indices)  # [B, K, N, block_size, D]
    return gathered.reshape(*gathered.shape[:2], -1, gathered.shape[-1])


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
    window: int | None,
    positions: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.block_sparse_attention.block_sparse_attention`."""
    num_tokens, kv_heads = q.shape[1], k_cache.shape[layout.index("K")]
    rows = to_rows(q, kv_heads)
    held = jnp.arange(block_indices.shape[2], dtype=jnp.int32) < num_blocks[..., None]  # [B, K, N]
    # Entries past the count may hold anything: they read block 0, and count for nothing.
    indices = jnp.where(held, block_indices, 0)
    slots = indices[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    alive = held[..., None] & (slots < lengths[:, None, None, None])
    slots, alive = (x.reshape(*x.shape[:2], -1) for x in (slots, alive))  # [B, K, N * block_size]

    def gather(cache: jax.Array) -> jax.Array:
        blocks = gather_blocks(cache, indices, block_size=block_size, layout=layout)
        # Dead slots may hold NaN, which a weight of 0 would not make harmless. The copy does it on its way.
        return jnp.where(alive[..., None], blocks, 0)

    mask = alive[:, :, None]
    if window is not None:
        assert positions is not None
        row_positions = jnp.tile(positions, (1, rows.shape[2] // num_tokens))  # [B, R]
        mask = mask & (slots[:, :, None] > row_positions[:, None, :, None] - window)
    out, lse = attend_rows(rows, gather(k_cache), gather(v_cache), mask, layout="BKSD", scale=scale)
    return from_rows(out, num_tokens), from_rows(lse, num_tokens)[..., 0]
