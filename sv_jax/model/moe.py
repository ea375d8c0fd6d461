"""Mixture of experts: a router in float32, and the experts that tokens were sent to, none of them dropped.

Tokens are sorted by expert and cut into tiles of one expert each; a loop runs over the tiles that there are.
Its trip count is data, every shape is static, and an expert that nobody wants is not read. The few tokens of
a verify step make one tile for each active expert, those of prefill several.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sv_jax.config import ModelConfig, MoEConfig
from sv_jax.model.ffn import FeedForward
from sv_jax.model.layers import Linear, multiply, parameter
from sv_jax.sharding import MODEL, Sharding

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


def route(logits: jax.Array, moe: MoEConfig, live: jax.Array | None) -> Routing:
    """The k experts with the largest probabilities.

    Args:
      logits: float32[B, T, E].
      live: bool[B, T], tokens that count; the others go nowhere. None: all do.
    """
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), moe.num_experts_per_tok)
    if moe.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if live is not None:
        experts = jnp.where(live[..., None], experts, moe.num_experts)
    return Routing(experts.astype(jnp.int32), weights)


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


class MoE(nn.Module):
    """Experts in place of a feed-forward network, x [B, T, d] -> [B, T, d]; a shared one beside them."""

    config: ModelConfig
    dtype: str
    sharding: Sharding

    @nn.compact
    def __call__(self, x: jax.Array, live: jax.Array | None) -> jax.Array:
        """live: bool[B, T], tokens that count; of the others the output means nothing."""
        moe = self.config.moe
        assert moe is not None
        wide = x.astype(jnp.float32)
        router = Linear(moe.num_experts, ("embed", "all_experts"), dtype="float32", name="router")
        routing = route(router(wide), moe, live)
        weights = Experts(moe, x.shape[-1], self.dtype, name="experts")()
        y = self._run(x, routing, weights)
        if moe.shared_expert_size:
            shared = FeedForward(self.config, self.dtype, moe.shared_expert_size, name="shared")(x)
            gate = Linear(1, ("embed", "one"), dtype=self.dtype, output_dtype="float32", name="shared_gate")
            y = y + jax.nn.sigmoid(gate(x)) * shared.astype(jnp.float32)
        return y.astype(self.dtype)

    def _run(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        if self.is_initializing():  # shapes alone; the batch may not divide by the mesh
            return x.astype(jnp.float32)

        def run(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
            flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), routing)
            return run_experts(x.reshape(-1, x.shape[-1]), flat, weights).reshape(x.shape)

        if self.sharding.mesh.size == 1:
            return run(x, routing, weights)

        def run_shard(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
            own = weights.gate.shape[0]
            local = routing.experts - jax.lax.axis_index(MODEL) * own
            local = jnp.where((local >= 0) & (local < own), local, own)
            return jax.lax.psum(run(x, Routing(local, routing.weights), weights), MODEL)

        by_batch = self.sharding.spec("batch", None, None)
        in_specs = (by_batch, by_batch, self.sharding.spec("experts"))
        # Shards run through different numbers of tiles: what varies over the mesh is not followed in loops.
        sharded = jax.shard_map(
            run_shard, mesh=self.sharding.mesh, in_specs=in_specs, out_specs=by_batch, check_vma=False
        )
        return sharded(x, routing, weights)


class Experts(nn.Module):
    """The parameters of all experts, [E, in, out]."""

    moe: MoEConfig
    features: int
    dtype: str

    @nn.compact
    def __call__(self) -> ExpertWeights:
        init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        experts, size = self.moe.num_experts, self.moe.expert_size

        def declare(name: str, *shape: int) -> jax.Array:
            return parameter(self, name, init, ("experts", None, None), (experts, *shape), self.dtype)

        return ExpertWeights(
            declare("gate", self.features, size),
            declare("up", self.features, size),
            declare("down", size, self.features),
        )
