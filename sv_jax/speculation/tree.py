"""Draft trees as arrays: ancestors, depths, paths. Node 0 is the root and parents point backwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ancestor_mask(parents: jax.Array) -> jax.Array:
    """bool[B, T, T], True where u is t or an ancestor of t; from parents int32[B, T] (-1: none).

    This is the attention mask among the step's tokens. An empty slot sees itself alone.
    """
    num_nodes = parents.shape[1]
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    mask = (parents[:, :, None] == nodes) | (nodes[:, None] == nodes)
    reach = 1
    while reach < num_nodes - 1:  # squaring doubles the generations that the mask spans
        mask = jnp.einsum("btu,buv->btv", mask.astype(jnp.float32), mask.astype(jnp.float32)) > 0
        reach *= 2
    return mask


def node_depths(ancestors: jax.Array) -> jax.Array:
    """int32[B, T]: edges between the root and node t (0 for empty slots)."""
    return jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1


def path_to(ancestors: jax.Array, node: jax.Array) -> jax.Array:
    """int32[B, T]: the nodes from the root to `node` int32[B], in order; the rest repeats T - 1."""
    num_nodes = ancestors.shape[1]
    on_path = jnp.take_along_axis(ancestors, node[:, None, None], axis=1)[:, 0]
    # Parents come before children, so index order is depth order.
    indices = jnp.where(on_path, jnp.arange(num_nodes, dtype=jnp.int32), num_nodes - 1)
    return jnp.sort(indices, axis=-1)


def existing_nodes(parents: jax.Array) -> jax.Array:
    """bool[B, T]: the root and what is drafted, not the empty slots."""
    return (parents >= 0).at[:, 0].set(True)
