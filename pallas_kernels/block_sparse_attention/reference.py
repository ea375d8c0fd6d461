"""Plain-XLA block-sparse attention: the semantics, and what every platform can run."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cache_attention.reference import attend_rows, from_rows, to_rows


def gather_blocks(cache: jax.Array, block_indices: jax.Array, *, block_size: int) -> jax.Array:
    """Copies the blocks of each KV head next to each other: -> [B, K, N * block_size, D].

    Args:
      cache: [B, G, S, W], G groups of K / G heads side by side. block_indices: int32[B, K, N].

    A copy of few blocks stays in the processor's caches, and what follows is one batched product: on CPU that
    is twice as fast as a product a block.
    """

    (batch, groups, _, width), kv_heads = cache.shape, block_indices.shape[1]
    per_group = kv_heads // groups
    blocks = cache.reshape(batch, groups, -1, block_size, width)
    split = block_indices.reshape(batch, groups, -1)  # [B, G, p * N]
    take = jax.vmap(jax.vmap(lambda blocks, index: blocks.at[index].get(mode="clip")))
    gathered = take(blocks, split).reshape(batch, groups, per_group, -1, width)
    if per_group > 1:  # each head's lanes of its blocks
        lanes = jnp.split(gathered, per_group, axis=4)
        gathered = jnp.stack([lane[:, :, head] for head, lane in enumerate(lanes)], axis=2)
    return gathered.reshape(batch, kv_heads, -1, width // per_group)


def block_sparse_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_indices: jax.Array,
    num_blocks: jax.Array,
    lengths: jax.Array,
    *,
    block_size: int,
    window: int | None,
    positions: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.block_sparse_attention.block_sparse_attention`."""
    num_tokens, kv_heads = q.shape[1], block_indices.shape[1]
    rows = to_rows(q, kv_heads)
    held = jnp.arange(block_indices.shape[2], dtype=jnp.int32) < num_blocks[..., None]  # [B, K, N]
    # Entries past the count may hold anything: they read block 0, and count for nothing.
    indices = jnp.where(held, block_indices, 0)
    slots = indices[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    alive = held[..., None] & (slots < lengths[:, None, None, None])
    slots, alive = (x.reshape(*x.shape[:2], -1) for x in (slots, alive))  # [B, K, N * block_size]

    def gather(cache: jax.Array) -> jax.Array:
        blocks = gather_blocks(cache, indices, block_size=block_size)
        # Dead slots may hold NaN, which a weight of 0 would not make harmless. The copy does it on its way.
        return jnp.where(alive[..., None], blocks, 0)

    mask = alive[:, :, None]
    if window is not None:
        assert positions is not None
        row_positions = jnp.tile(positions, (1, rows.shape[2] // num_tokens))  # [B, R]
        mask = mask & (slots[:, :, None] > row_positions[:, None, :, None] - window)
    out, lse = attend_rows(rows, gather(k_cache), gather(v_cache), mask, scale=scale)
    return from_rows(out, num_tokens), from_rows(lse, num_tokens)[..., 0]
