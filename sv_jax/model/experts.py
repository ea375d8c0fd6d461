"""Experts of a mixture: the products of the tokens that were sent to each, none of them dropped.

Tokens are sorted by expert and cut into tiles of one expert each; a loop runs over the tiles that there are.
Its trip count is data, every shape is static, and an expert that nobody wants is not read. The few tokens of
a verify step make one tile for each active expert, those of prefill several.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sv_jax.model.layers import multiply

SMALLEST_TILE, LARGEST_TILE = 8, 128  # tokens


class Routing(NamedTuple):
    """Where tokens go."""

    experts: jax.Array  # int32[B, T, k]; num_experts: nowhere
    weights: jax.Array  # float32[B, T, k]


class ExpertWeights(NamedTuple):
    """E experts; of a shard, its own ones."""

    gate: jax.Array  # [E, d, F]
    up: jax.Array  # [E, d, F]
    down: jax.Array  # [E, F, d]


def tile_size(num_tokens: int, num_experts: int, experts_per_token: int) -> int:
    """Tokens of a tile: about what an expert gets, so that tiles are neither many nor mostly empty."""
    mean = num_tokens * experts_per_token / num_experts
    size = SMALLEST_TILE
    while size < min(mean, LARGEST_TILE):
        size *= 2
    return min(size, num_tokens)


def run_experts(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    """The weighted sum of each token's experts, float32[N, d].

    Args:
      x: [N, d]. routing: of N tokens, [N, k] each, with experts from 0; those past the last one are nowhere.
      weights: E experts.
    """
    num_tokens, per_token = routing.experts.shape
    num_experts, total = weights.gate.shape[0], routing.experts.size
    size = tile_size(num_tokens, num_experts, per_token)
    chosen = routing.experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)  # pairs of a token and an expert, by expert
    counts = jnp.zeros(num_experts, jnp.int32).at[chosen].add(1, mode="drop")
    firsts = jnp.cumsum(counts) - counts
    tiles = (counts + size - 1) // size
    ends = jnp.cumsum(tiles)  # of each expert's tiles

    def run_tile(tile: jax.Array, y: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
        gate, up, down = (jax.lax.dynamic_index_in_dim(w, expert, 0, keepdims=False) for w in weights)
        done = (tile - (ends[expert] - tiles[expert])) * size  # of this expert's tokens
        slots = done + jnp.arange(size, dtype=jnp.int32)
        pairs = order[jnp.minimum(firsts[expert] + slots, total - 1)]
        tokens = jnp.where(slots < counts[expert], pairs // per_token, num_tokens)  # past the end: nobody
        rows = jnp.take(x, tokens, axis=0, mode="clip")
        gated, linear = (multiply(rows, w).astype(x.dtype) for w in (gate, up))
        out = multiply(nn.silu(gated) * linear, down)
        share = routing.weights.reshape(-1)[pairs]
        return y.at[tokens].add(share[:, None] * out, mode="drop")

    return jax.lax.fori_loop(0, ends[-1], run_tile, jnp.zeros(x.shape, jnp.float32))
