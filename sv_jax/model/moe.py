"""Mixture of experts: a router in float32, and where its tokens go (`experts.py` has the products)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from sv_jax.config import ModelConfig, MoEConfig
from sv_jax.model.experts import ExpertWeights, Routing, run_experts
from sv_jax.model.ffn import FeedForward
from sv_jax.model.layers import Linear, parameter
from sv_jax.sharding import MODEL, Sharding


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
