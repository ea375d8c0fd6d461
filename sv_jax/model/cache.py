"""The KV cache: one contiguous array per layer, sized to its bucket, with lengths kept by the caller."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.platform import Layout
from sv_jax.config import ModelConfig

LayerKV = tuple[jax.Array, jax.Array]
"""(keys, values) of one layer for the T tokens of a step, each [B, T, K, D]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """K (after RoPE) and V of all committed tokens; slot s of a row holds the token at position s.

    What counts is decided by `lengths: int32[B]` beside it: whatever lies at or behind a row's length does
    not exist. The layout is the platform's (pallas_kernels.platform).
    """

    keys: tuple[jax.Array, ...]  # per layer, axes in the order of `layout`
    values: tuple[jax.Array, ...]
    layout: Layout = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Slots per row: the bucket."""
        return self.keys[0].shape[self.layout.index("S")]

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    def write(self, new_kv: tuple[LayerKV, ...], lengths: jax.Array) -> KVCache:
        """Writes T tokens per row at slots lengths[b] .. lengths[b] + T - 1.

        The caller guarantees lengths + T <= capacity: `dynamic_update_slice` would clamp the start and
        overwrite committed slots in silence.
        """

        def put(cache: jax.Array, new: jax.Array) -> jax.Array:
            if self.layout == "BKSD":
                new = jnp.swapaxes(new, 1, 2)

            def put_row(row: jax.Array, update: jax.Array, start: jax.Array) -> jax.Array:
                starts = [jnp.zeros_like(start)] * 3
                starts[self.layout.index("S") - 1] = start
                return jax.lax.dynamic_update_slice(row, update, starts)

            return jax.vmap(put_row)(cache, new.astype(cache.dtype), lengths)

        keys = tuple(put(c, k) for c, (k, _) in zip(self.keys, new_kv))
        values = tuple(put(c, v) for c, (_, v) in zip(self.values, new_kv))
        return dataclasses.replace(self, keys=keys, values=values)

    def grow(self, capacity: int) -> KVCache:
        """The same contents with more slots. Raises ValueError if `capacity` is smaller than it is."""
        extra = capacity - self.capacity
        if extra < 0:
            raise ValueError(f"cannot shrink a cache of {self.capacity} slots to {capacity}")
        padding = [(0, extra if axis == "S" else 0) for axis in self.layout]
        return dataclasses.replace(
            self,
            keys=tuple(jnp.pad(k, padding) for k in self.keys),
            values=tuple(jnp.pad(v, padding) for v in self.values),
        )


def cache_axes(layout: Layout) -> tuple[str | None, ...]:
    """Logical axes of one layer's array, for sharding."""
    names: dict[str, str | None] = {"B": "batch", "K": "kv_heads", "S": None, "D": None}
    return tuple(names[axis] for axis in layout)


def cache_shape(config: ModelConfig, batch: int, capacity: int, layout: Layout) -> tuple[int, ...]:
    """Shape of one layer's keys (and of its values)."""
    sizes = {"B": batch, "K": config.num_kv_heads, "S": capacity, "D": config.head_dim}
    return tuple(sizes[axis] for axis in layout)
