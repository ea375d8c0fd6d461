"""Heads side by side: p KV heads of D numbers in one group of p * D lanes (`platform.heads_per_group`).

    cache [B, G, S, W]    G = K / p groups, W = p * D; head k lies in group k // p at lanes (k % p) * D ..

A product over all lanes of a group is one over a head's own if the query has zeros in the others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def check_shapes(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> int:
    """K, the KV heads of caches [B, G, S, W] that queries [B, T, H, D] go with. Raises ValueError."""
    heads, head_dim = q.shape[2:]
    group, rest = divmod(k_cache.shape[3], head_dim)
    kv_heads = group * k_cache.shape[1]
    if k_cache.shape != v_cache.shape or q.shape[0] != k_cache.shape[0] or rest or heads % max(kv_heads, 1):
        raise ValueError(f"q {q.shape}, k {k_cache.shape}, v {v_cache.shape} do not fit each other")
    return kv_heads


def pack_heads(x: jax.Array, group: int) -> jax.Array:
    """Keys or values [B, T, K, D] -> [B, K / p, T, p * D], as they lie in the cache; group: p."""
    batch, num_tokens, kv_heads, head_dim = x.shape
    return jnp.swapaxes(x.reshape(batch, num_tokens, kv_heads // group, group * head_dim), 1, 2)


def unpack_heads(cache: jax.Array, head_dim: int) -> jax.Array:
    """[B, G, S, W] -> [B, K, S, D]: a copy where heads lie side by side."""
    batch, groups, positions, width = cache.shape
    if width == head_dim:
        return cache
    split = cache.reshape(batch, groups, positions, width // head_dim, head_dim)
    return jnp.moveaxis(split, 3, 2).reshape(batch, -1, positions, head_dim)


def spread_rows(rows: jax.Array, group: int) -> jax.Array:
    """Query rows [B, K, R, D] -> [B, K / p, p * R, p * D]: each in its head's lanes, zeros in the others."""
    if group == 1:
        return rows
    batch, kv_heads, num_rows, head_dim = rows.shape
    split = rows.reshape(batch, kv_heads // group, group, num_rows, 1, head_dim)
    own = jnp.eye(group, dtype=bool)[:, None, :, None]  # [p, 1, p, 1]
    return jnp.where(own, split, 0).reshape(batch, kv_heads // group, group * num_rows, group * head_dim)


def collect_rows(out: jax.Array, group: int) -> jax.Array:
    """Results [B, K / p, p * R, p * D] -> [B, K, R, D]: of each row its head's lanes."""
    if group == 1:
        return out
    batch, groups, num_rows, width = out.shape
    split = out.reshape(batch, groups, group, num_rows // group, group, width // group)
    own = [split[:, :, head, :, head] for head in range(group)]
    return jnp.stack(own, axis=2).reshape(batch, groups * group, num_rows // group, width // group)
