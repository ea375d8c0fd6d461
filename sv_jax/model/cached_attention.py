"""Attention of a step's tokens over the committed cache: all of it or selected blocks, by whatever the
platform runs, each device over its own rows and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import block_sparse_attention, pick_implementation
from pallas_kernels.cache_attention import cache_attention
from pallas_kernels.platform import MOST_STEP_TOKENS
from sv_jax.config import ModelConfig
from sv_jax.model.cache import CACHE_AXES, LayerKV, empty_cache
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
        read = partial(self._read, q, cached, lengths, positions)
        if selection is None or selection.whole is None:
            return read(selection)
        return jax.lax.cond(selection.whole, lambda: read(None), lambda: read(selection))

    def _read(
        self,
        q: jax.Array,
        cached: LayerKV,
        lengths: jax.Array,
        positions: jax.Array,
        selection: Selection | None,
    ) -> tuple[jax.Array, jax.Array]:
        chosen: tuple[jax.Array, ...] = ()
        if selection is None:
            size = min(DENSE_BLOCK, cached[0].shape[2])
            entries = cached[0].shape[2] // size // self.sharding.parts("kv_length")
        else:
            size, entries = selection.block_size, selection.block_indices.shape[2]
            chosen = selection.block_indices, selection.num_blocks
        picked = self.implementation_for(q.shape, cached[0].shape, cached[0].dtype, size, entries)
        read: Callable[..., Any] = partial(self._read_own, picked, size)
        if picked == "xla" and self.sharding.parts("kv_length") == 1:  # XLA cuts it by itself
            return read(q, *cached, lengths, positions, *chosen)
        by_head = "batch", "kv_heads"
        axes = QUERY_AXES, CACHE_AXES, CACHE_AXES, ("batch",), ("batch", None), (*by_head, None), by_head
        read = on_shards(read, self.sharding, axes[: 5 + len(chosen)], (QUERY_AXES, QUERY_AXES[:3]))
        return read(q, *cached, lengths, positions, *chosen)

    def _read_own(
        self,
        picked: str,
        block_size: int,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        lengths: jax.Array,
        positions: jax.Array,
        *chosen: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Attention over what one device has of the cache; merged, where others have more of the same rows.

        chosen: block_indices and num_blocks of whole rows, or nothing: all blocks.
        """
        slots, several = keys.shape[2], self.sharding.parts("kv_length") > 1
        if several:
            first = self.sharding.first_slot(slots)
            lengths, positions = jnp.clip(lengths - first, 0, slots), positions - first
            if chosen:
                chosen = own_blocks(chosen[0], chosen[1], first // block_size, slots // block_size)
        if picked != "xla" and not chosen:
            chosen = self._every_block(q, keys, lengths, positions, block_size)
        if chosen:
            part = block_sparse_attention(
                q,
                keys,
                values,
                chosen[0],
                chosen[1],
                lengths,
                block_size=block_size,
                window=self.window,
                positions=positions,
                scale=self.scale,
                implementation=picked,
            )
        else:
            part = cache_attention(q, keys, values, lengths, positions, window=self.window, scale=self.scale)
        return merge_parts(*part, self.sharding.mesh_axes("kv_length")) if several else part

    def _every_block(
        self, q: jax.Array, keys: jax.Array, lengths: jax.Array, positions: jax.Array, size: int
    ) -> tuple[jax.Array, jax.Array]:
        """block_indices and num_blocks of all blocks with a position that some token sees."""
        held = (lengths + size - 1) // size
        first = jnp.zeros_like(lengths)
        if self.window is not None:
            first = jnp.clip((jnp.min(positions, axis=1) - self.window + 1) // size, 0, held)
        kv_heads = keys.shape[1] * keys.shape[3] // q.shape[3]
        shape = (q.shape[0], kv_heads, keys.shape[2] // size)
        blocks = first[:, None] + jnp.arange(shape[2], dtype=jnp.int32)
        return (
            jnp.broadcast_to(blocks[:, None], shape),
            jnp.broadcast_to((held - first)[:, None], shape[:2]),
        )

    def implementation_for(
        self,
        q_shape: tuple[int, ...],
        cache_shape: tuple[int, ...],
        dtype: Any,
        block_size: int,
        entries: int,
    ) -> str:
        """What runs for q [B, T, H, D] over a cache [B, K / p, S, p * D], both of the whole mesh.

        Args:
          entries: N, the most blocks of a KV head that one device reads.

        Raises NotImplementedError for a named implementation that does not take them.
        """
        if q_shape[1] > MOST_STEP_TOKENS:
            return "xla"
        return pick_implementation(
            self.implementation,
            self.sharding.platform,
            self.sharding.named(*QUERY_AXES).shard_shape(q_shape),
            self.sharding.named(*CACHE_AXES).shard_shape(cache_shape),
            jnp.dtype(dtype),
            block_size=block_size,
            entries=entries,
        )


def step_implementation(
    config: ModelConfig,
    reader: CacheReader,
    dtype: str,
    *,
    batch: int,
    tokens: int,
    capacity: int,
    selected: tuple[int, int] | None = None,
) -> str:
    """What runs for `batch` rows of `tokens` tokens over a cache of `capacity` slots.

    Args:
      selected: block size and most blocks of a KV head; None: all positions are read.

    Raises NotImplementedError for a named implementation that does not take them.
    """
    size = min(DENSE_BLOCK, capacity)
    if selected is None:
        selected = size, capacity // size // reader.sharding.parts("kv_length")
    cache = jax.eval_shape(lambda: empty_cache(config, batch, capacity, dtype, reader.sharding))
    q_shape = (batch, tokens, config.num_heads, config.head_dim)
    return reader.implementation_for(q_shape, cache.keys[0].shape, dtype, *selected)


def own_blocks(
    block_indices: jax.Array, num_blocks: jax.Array, first: jax.Array | int, count: int
) -> tuple[jax.Array, jax.Array]:
    """Of selected blocks, int32[B, K, N] and [B, K], those of a device with `count` blocks from `first` on,
    by its own numbers, and how many they are."""
    entry = jnp.arange(block_indices.shape[2], dtype=jnp.int32)
    own = block_indices - first
    here = (entry < num_blocks[..., None]) & (own >= 0) & (own < count)
    packed = jnp.sort(jnp.where(here, own, jnp.iinfo(jnp.int32).max), axis=-1)
    return packed, jnp.sum(here, axis=-1, dtype=jnp.int32)


def merge_parts(out: jax.Array, lse: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Joins attention over disjoint positions on the devices along `axes`: each out weighs exp(lse).

    Where no device has anything: 0, and lse -inf.
    """
    peak = jax.lax.pmax(lse, axes)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weight = jnp.exp(lse - peak)
    total, out = jax.lax.psum((weight, weight[..., None] * out), axes)
    some = total > 0
    divisor = jnp.where(some, total, 1.0)
    return out / divisor[..., None], jnp.where(some, jnp.log(divisor) + peak, -jnp.inf)
