"""Attention of a step's tokens over the committed cache: all of it or selected blocks, by whatever the
platform runs, each device over its own rows and heads."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import block_sparse_attention, pick_implementation
from pallas_kernels.cache_attention import cache_attention
from pallas_kernels.platform import MOST_STEP_TOKENS
from sv_jax.model.cache import CACHE_AXES, LayerKV
from sv_jax.sharding import Sharding, on_shards

QUERY_AXES = ("batch", None, "heads", None)
DENSE_BLOCK = 128  # positions of a block where a kernel reads all of them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """The blocks of cached positions that a layer reads, one set for all T tokens of the step."""

    block_indices: jax.Array  # int32[B, K, N]; entries past the count are not read
    num_blocks: jax.Array  # int32[B, K]
    whole: jax.Array | None  # bool[]: nothing that counts is left out, read densely; None: never
    block_size: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class CacheReader:
    """What is the same for all steps of a layer.

    implementation: one of the kernel's IMPLEMENTATIONS for steps of up to MOST_STEP_TOKENS tokens; None: the
      platform's, where it takes the shapes. More tokens, of prefill, are plain XLA's.
    """

    window: int | None
    scale: float
    implementation: str | None
    sharding: Sharding

    def attend(
        self,
        q: jax.Array,
        cached: LayerKV,
        lengths: jax.Array,
        positions: jax.Array,
        selection: Selection | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attention over the cache, as `block_sparse_attention` gives it.

        Args:
          q: [B, T, H, D] after RoPE. cached: K and V of the layer, [B, K / p, S, p * D] each.
          lengths: int32[B]. positions: int32[B, T]. selection: None: all blocks.
        """
        dense = partial(self._dense, q, cached, lengths, positions)
        if selection is None:
            return dense()
        sparse = partial(self._blocks, q, cached, lengths, positions, selection)
        return sparse() if selection.whole is None else jax.lax.cond(selection.whole, dense, sparse)

    def _dense(
        self, q: jax.Array, cached: LayerKV, lengths: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        every = self._every_block(q, cached, lengths)
        if self._picked(q, cached, every) != "xla":
            return self._blocks(q, cached, lengths, positions, every)
        return cache_attention(q, *cached, lengths, positions, window=self.window, scale=self.scale)

    def _every_block(self, q: jax.Array, cached: LayerKV, lengths: jax.Array) -> Selection:
        """All blocks with a position that some token sees; the first one sees the oldest."""
        _, groups, capacity, width = cached[0].shape
        size = min(DENSE_BLOCK, capacity)
        held = (lengths + size - 1) // size
        first = 0 * lengths if self.window is None else jnp.maximum(lengths - self.window + 1, 0) // size
        shape = (q.shape[0], groups * width // q.shape[3], capacity // size)
        blocks = first[:, None] + jnp.arange(shape[2], dtype=jnp.int32)
        return Selection(
            jnp.broadcast_to(blocks[:, None], shape),
            jnp.broadcast_to((held - first)[:, None], shape[:2]),
            None,
            size,
        )

    def _picked(self, q: jax.Array, cached: LayerKV, selection: Selection) -> str:
        size, entries = selection.block_size, selection.block_indices.shape[2]
        return self.implementation_for(q.shape, cached[0].shape, cached[0].dtype, size, entries)

    def implementation_for(
        self,
        q_shape: tuple[int, ...],
        cache_shape: tuple[int, ...],
        dtype: Any,
        block_size: int,
        entries: int,
    ) -> str:
        """What runs for q [B, T, H, D] over a cache [B, K / p, S, p * D], both of the whole mesh.

        Raises NotImplementedError for a named implementation that does not take them.
        """
        if q_shape[1] > MOST_STEP_TOKENS:
            return "xla"
        q_local = self.sharding.named(*QUERY_AXES).shard_shape(q_shape)
        cache_local = self.sharding.named(*CACHE_AXES).shard_shape(cache_shape)
        platform = self.sharding.platform
        return pick_implementation(
            self.implementation,
            platform,
            q_local,
            cache_local,
            jnp.dtype(dtype),
            block_size=block_size,
            entries=entries,
        )

    def _blocks(
        self,
        q: jax.Array,
        cached: LayerKV,
        lengths: jax.Array,
        positions: jax.Array,
        selection: Selection,
    ) -> tuple[jax.Array, jax.Array]:
        picked = self._picked(q, cached, selection)

        def attend(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            *arguments, positions = arrays
            return block_sparse_attention(
                *arguments,
                block_size=selection.block_size,
                window=self.window,
                positions=positions,
                scale=self.scale,
                implementation=picked,
            )

        if picked != "xla":  # XLA cannot cut a kernel
            by_head, by_row = ("batch", "kv_heads"), ("batch", None)
            axes = QUERY_AXES, CACHE_AXES, CACHE_AXES, (*by_head, None), by_head, by_row[:1], by_row
            attend = on_shards(attend, self.sharding, axes, (QUERY_AXES, QUERY_AXES[:3]))
        blocks = selection.block_indices, selection.num_blocks
        return attend(q, *cached, *blocks, lengths, positions)
