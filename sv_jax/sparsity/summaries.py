"""Summaries of the cache's blocks, which scores are computed from.

Recomputed from K for the blocks that a commit touches, never updated in place: nothing to get wrong when
drafts are rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.packing import unpack_heads
from sv_jax.config import ModelConfig
from sv_jax.model.cache import CACHE_AXES, KVCache
from sv_jax.sharding import Sharding, on_shards
from sv_jax.sparsity.plan import AttentionPlan

# What each score reads of a block.
STATISTICS: Mapping[str, tuple[str, ...]] = {
    "mean": ("mean",),
    "bound": ("low", "high"),
    "mass": ("fine_means",),
}
KEYS_PER_MEAN = 16  # of fine_means; divides every block size
SUMMARY_AXES = ("batch", "kv_heads", "kv_length", None)

LayerSummary = dict[str, jax.Array]
"""Statistic -> float32[B, K, S / block_size * vectors, D], of a block's committed keys; 0 where it has none.

One vector a block, but for fine_means: a mean of every KEYS_PER_MEAN keys, in order of position. (Those of a
block side by side, [.., vectors * D], would be relaid on TPU, in every layer of every step.)"""


def vectors_per_block(score: str, block_size: int) -> int:
    """Vectors of D numbers that a score reads for each block."""
    return sum(_vectors(name, block_size) for name in STATISTICS[score])


def _vectors(statistic: str, block_size: int) -> int:
    return block_size // KEYS_PER_MEAN if statistic == "fine_means" else 1


def _kv_heads(summary: LayerSummary) -> int:
    return next(iter(summary.values())).shape[-3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockSummaries:
    """Of every layer that selects; None for the others."""

    layers: tuple[LayerSummary | None, ...]
    block_size: int = dataclasses.field(metadata={"static": True})

    def grow(self, capacity: int) -> BlockSummaries:
        """The same contents for a cache of `capacity` positions."""

        def pad(name: str, x: jax.Array) -> jax.Array:
            size = capacity // self.block_size * _vectors(name, self.block_size)
            return jnp.pad(x, [(0, 0), (0, 0), (0, size - x.shape[2]), (0, 0)])

        layers = (layer and {name: pad(name, x) for name, x in layer.items()} for layer in self.layers)
        return dataclasses.replace(self, layers=tuple(layers))


def start_summaries(
    block_size: int,
    statistics: Sequence[str],
    layers: Container[int],
    model: ModelConfig,
    batch: int,
    capacity: int,
) -> BlockSummaries:
    """Of an empty cache of `capacity` positions; `layers` are those that have summaries."""

    def zeros(name: str) -> jax.Array:
        vectors = capacity // block_size * _vectors(name, block_size)
        return jnp.zeros((batch, model.num_kv_heads, vectors, model.head_dim), jnp.float32)

    def layer(index: int) -> LayerSummary | None:
        if index not in layers:
            return None
        return {name: zeros(name) for name in statistics}

    return BlockSummaries(tuple(layer(i) for i in range(model.num_layers)), block_size)


def planned_summaries(plan: AttentionPlan, model: ModelConfig, batch: int, capacity: int) -> BlockSummaries:
    """Of an empty cache: what the plan's scores read."""
    return start_summaries(plan.block_size, STATISTICS[plan.score], plan.anchors, model, batch, capacity)


def summarise(keys: jax.Array, alive: jax.Array, names: tuple[str, ...]) -> LayerSummary:
    """Statistics over blocks of keys.

    Args:
      keys: [K, M, block_size, D]. alive: bool[M, block_size].

    Returns:
      float32[K, M * vectors, D] each. Dead keys, which may be anything, play no part.
    """
    keys, mask = keys.astype(jnp.float32), alive[None, :, :, None]
    some = jnp.any(mask, axis=2)

    def extreme(reduce: object, fill: float) -> jax.Array:
        return jnp.where(some, reduce(jnp.where(mask, keys, fill), axis=2), 0.0)  # type: ignore[operator]

    def compute(name: str) -> jax.Array:
        if name == "low":
            return extreme(jnp.min, jnp.inf)
        if name == "high":
            return extreme(jnp.max, -jnp.inf)
        assert name in ("mean", "fine_means"), name
        size = keys.shape[2] if name == "mean" else KEYS_PER_MEAN
        parts = (-1, size)  # of a block's keys
        count = jnp.maximum(jnp.sum(mask.reshape(1, mask.shape[1], *parts, 1), axis=3), 1)
        total = jnp.sum(jnp.where(mask, keys, 0.0).reshape(*keys.shape[:2], *parts, keys.shape[3]), axis=3)
        return (total / count).reshape(keys.shape[0], -1, keys.shape[3])

    return {name: compute(name) for name in names}


def update_summaries(
    summaries: BlockSummaries,
    cache: KVCache,
    before: jax.Array,
    after: jax.Array,
    num_tokens: int,
    sharding: Sharding,
) -> BlockSummaries:
    """Summaries after a commit; each device updates those of its own part of the cache.

    Args:
      cache: as the commit left it. before, after: int32[B], its lengths around the commit, which wrote
        num_tokens slots from before[b] on; what lies behind after[b] does not exist.
    """
    size = summaries.block_size

    def layer(keys: jax.Array, old: LayerSummary, before: jax.Array, after: jax.Array) -> LayerSummary:
        slots = keys.shape[2]
        first_slot = sharding.first_slot(slots)
        before, after = (jnp.clip(x - first_slot, 0, slots) for x in (before, after))
        total = slots // size
        touched = min((num_tokens + size - 2) // size + 1, total)
        # At the end of the cache the span begins earlier: those blocks get the same values once more.
        first = jnp.minimum(before // size, total - touched)
        return jax.vmap(partial(row, touched))(keys, old, first, after)

    def row(
        touched: int, keys: jax.Array, old: LayerSummary, first: jax.Array, length: jax.Array
    ) -> LayerSummary:
        span = jax.lax.dynamic_slice_in_dim(keys, first * size, touched * size, 1)
        span = unpack_heads(span[None], keys.shape[2] * keys.shape[0] // _kv_heads(old))[0]
        span = span.reshape(span.shape[0], touched, size, span.shape[-1])
        slots = first * size + jnp.arange(touched * size, dtype=jnp.int32)
        new = summarise(span, (slots < length).reshape(touched, size), tuple(old))
        starts = {name: (0, first * _vectors(name, size), 0) for name in old}
        return {name: jax.lax.dynamic_update_slice(old[name], new[name], starts[name]) for name in old}

    update = on_shards(layer, sharding, (CACHE_AXES, SUMMARY_AXES, ("batch",), ("batch",)), SUMMARY_AXES)
    with jax.named_scope("summaries"):
        layers = tuple(
            None if old is None else update(keys, old, before, after)
            for keys, old in zip(cache.keys, summaries.layers)
        )
    return dataclasses.replace(summaries, layers=layers)
