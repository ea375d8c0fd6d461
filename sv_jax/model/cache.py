"""The KV cache: one contiguous array per layer, sized to its bucket, with lengths kept by the caller."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.packing import pack_heads
from pallas_kernels.platform import heads_per_group
from sv_jax.config import ModelConfig
from sv_jax.sharding import Sharding, on_shards

LayerKV = tuple[jax.Array, jax.Array]
"""(keys, values) of one layer for the T tokens of a step, each [B, T, K, D]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """K (after RoPE) and V of all committed tokens; slot s of a row holds the token at position s.

    What counts is decided by `lengths: int32[B]` beside it: whatever lies at or behind a row's length does
    not exist. How many heads lie side by side is the platform's choice (`heads_per_group`).
    """

    keys: tuple[jax.Array, ...]  # per layer [B, K / p, S, p * D]
    values: tuple[jax.Array, ...]

    @property
    def capacity(self) -> int:
        """Slots per row: the bucket."""
        return self.keys[0].shape[2]

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    def write(self, new_kv: tuple[LayerKV, ...], lengths: jax.Array, sharding: Sharding) -> KVCache:
        """Writes T tokens per row at slots lengths[b] .. lengths[b] + T - 1; each device its own part.

        The caller guarantees lengths + T <= capacity: `dynamic_update_slice` would clamp the start and
        overwrite committed slots in silence.
        """
        axes = CACHE_AXES, ("batch", None, "kv_heads", None), ("batch",)
        put = on_shards(partial(_put, sharding=sharding), sharding, axes, CACHE_AXES)
        keys = tuple(put(c, k, lengths) for c, (k, _) in zip(self.keys, new_kv))
        values = tuple(put(c, v, lengths) for c, (_, v) in zip(self.values, new_kv))
        return dataclasses.replace(self, keys=keys, values=values)

    def grow(self, capacity: int) -> KVCache:
        """The same contents with more slots. Raises ValueError if `capacity` is smaller than it is."""
        extra = capacity - self.capacity
        if extra < 0:
            raise ValueError(f"cannot shrink a cache of {self.capacity} slots to {capacity}")
        padding = [(0, 0), (0, 0), (0, extra), (0, 0)]
        return dataclasses.replace(
            self,
            keys=tuple(jnp.pad(k, padding) for k in self.keys),
            values=tuple(jnp.pad(v, padding) for v in self.values),
        )


def _put(cache: jax.Array, new: jax.Array, lengths: jax.Array, *, sharding: Sharding) -> jax.Array:
    """This device's cache [B, K / p, S, p * D] with new [B, T, K, D] from lengths int32[B] on."""
    new = pack_heads(new, cache.shape[3] // new.shape[3]).astype(cache.dtype)
    put_row = _put_row if sharding.parts("kv_length") == 1 else _put_part
    written = jax.vmap(put_row)(cache, new, lengths - sharding.first_slot(cache.shape[2]))
    # Left to itself, XLA for TPU keeps such a cache position by position, heads in the sublanes, and copies
    # all of it to and fro: at entry and exit of the decode loop, and for each kernel.
    return with_layout_constraint(written, HEAD_MAJOR) if sharding.platform == "tpu" else written


def _put_row(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """row [G, S, W] with new [G, T, W] from slot `start` on."""
    return jax.lax.dynamic_update_slice(row, new, (jnp.zeros_like(start), start, 0))


def _put_part(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """As `_put_row`, of those tokens that belong here: a start may lie before slot 0, or behind the last."""
    groups, num_tokens, width = new.shape
    size = min(num_tokens, row.shape[1])
    window = jnp.clip(start, 0, row.shape[1] - size)
    old = jax.lax.dynamic_slice(row, (0, window, 0), (groups, size, width))
    token = window + jnp.arange(size, dtype=jnp.int32) - start  # that belongs in each slot
    here = (token >= 0) & (token < num_tokens)
    moved = jnp.take(new, jnp.clip(token, 0, num_tokens - 1), axis=1)
    return _put_row(row, jnp.where(here[:, None], moved, old), window)


CACHE_AXES = ("batch", "kv_heads", "kv_length", None)
"""Logical axes of one layer's array, for sharding."""

HEAD_MAJOR = Layout(major_to_minor=(0, 1, 2, 3))  # each head's positions one after the other


def cache_shape(config: ModelConfig, batch: int, capacity: int, group: int = 1) -> tuple[int, ...]:
    """Shape of one layer's keys (and of its values), `group` heads side by side."""
    return batch, config.num_kv_heads // group, capacity, group * config.head_dim


def empty_cache(config: ModelConfig, batch: int, capacity: int, dtype: str, sharding: Sharding) -> KVCache:
    """A cache of zeros. Bytes: 2 * layers * batch * KV heads * capacity * head_dim * itemsize."""
    kv_heads = config.num_kv_heads // sharding.parts("kv_heads")
    group = heads_per_group(sharding.platform, config.head_dim, kv_heads)
    shape = cache_shape(config, batch, capacity, group)

    def layers() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return KVCache(layers(), layers())
