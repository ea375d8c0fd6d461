"""Mixture of experts: a router in float32, and where its tokens go (`experts.py` has the products)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sv_jax.config import ModelConfig, MoEConfig
from sv_jax.model.experts import ExpertWeights, Routing, run_sharded_experts
from sv_jax.model.ffn import ChannelReads, FeedForward, LayerChannels
from sv_jax.model.layers import Linear, parameter
from sv_jax.sharding import Sharding


class ExpertReads(NamedTuple):
    """Experts of a step, int32[] each."""

    read: jax.Array  # experts that some token goes to
    wanted: jax.Array  # that some token would go to with nothing left out
    kept: jax.Array  # of the pairs below those that are still there
    pairs: jax.Array  # of a token and an expert that it would go to with nothing left out


class FFNReads(NamedTuple):
    """What a step used of a layer's feed-forward part; None: nothing was left out of that."""

    experts: ExpertReads | None
    channels: ChannelReads | None


def route(probabilities: jax.Array, moe: MoEConfig, live: jax.Array | None) -> Routing:
    """The k experts with the largest probabilities.

    Args:
      probabilities: float32[B, T, E].
      live: bool[B, T], tokens that count; the others go nowhere. None: all do.
    """
    weights, experts = jax.lax.top_k(probabilities, moe.num_experts_per_tok)
    if moe.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if live is not None:
        experts = jnp.where(live[..., None], experts, moe.num_experts)
    return Routing(experts.astype(jnp.int32), weights)


def count_experts(routing: Routing, wanted: Routing, num_experts: int) -> ExpertReads:
    """What a step reads with `routing`, beside what it would with `wanted`, the router's own."""

    def different(experts: jax.Array) -> jax.Array:
        goes = experts[..., None] == jnp.arange(num_experts, dtype=jnp.int32)
        return jnp.sum(jnp.any(goes, axis=(0, 1, 2)), dtype=jnp.int32)

    there = wanted.experts < num_experts
    kept = jnp.any(wanted.experts[..., :, None] == routing.experts[..., None, :], axis=-1) & there
    counts = (jnp.sum(x, dtype=jnp.int32) for x in (kept, there))
    return ExpertReads(different(routing.experts), different(wanted.experts), *counts)


class MoE(nn.Module):
    """Experts in place of a feed-forward network, x [B, T, d] -> [B, T, d]; a shared one beside them."""

    config: ModelConfig
    dtype: str
    sharding: Sharding

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        live: jax.Array | None = None,
        choose: Callable[[jax.Array, Routing], Routing] | None = None,
        channels: LayerChannels | None = None,
        counted: bool = False,
    ) -> tuple[jax.Array, FFNReads]:
        """The output, and what was used where some is left out.

        Args:
          live: bool[B, T], tokens that count; of the others the output means nothing. None: all do.
          choose: (probabilities, routing) -> routing, see `choices.ExpertChooser`; None: the router's.
          channels: of the shared expert and of the routed ones; None: all.
          counted: whether the experts that are read are counted.
        """
        moe = self.config.moe
        assert moe is not None
        router = Linear(moe.num_experts, ("embed", "all_experts"), dtype="float32", name="router")
        probabilities = jax.nn.softmax(router(x.astype(jnp.float32)), axis=-1)
        self.sow("intermediates", "probabilities", probabilities)
        routing = wanted = route(probabilities, moe, live)
        if choose is not None:
            routing = choose(probabilities, wanted)
        weights = Experts(moe, x.shape[-1], self.dtype, name="experts")()
        y, channel_reads = self._run(x, routing, weights, channels)
        if moe.shared_expert_size:
            size = moe.shared_expert_size
            network = FeedForward(self.config, self.dtype, self.sharding, size, name="shared")
            shared, shared_reads = network(x, live, channels)
            if shared_reads is not None and channel_reads is not None:
                channel_reads = jax.tree.map(jnp.add, channel_reads, shared_reads)
            gate = Linear(1, ("embed", "one"), dtype=self.dtype, output_dtype="float32", name="shared_gate")
            y = y + jax.nn.sigmoid(gate(x)) * shared.astype(jnp.float32)
        expert_reads = count_experts(routing, wanted, moe.num_experts) if counted else None
        return y.astype(self.dtype), FFNReads(expert_reads, channel_reads)

    def _run(
        self, x: jax.Array, routing: Routing, weights: ExpertWeights, channels: LayerChannels | None
    ) -> tuple[jax.Array, ChannelReads | None]:
        if self.is_initializing():  # shapes alone; the batch may not divide by the mesh
            return x.astype(jnp.float32), None
        sharding = self.sharding
        return run_sharded_experts(
            x,
            routing,
            weights,
            channels,
            mesh=sharding.mesh,
            batch_axes=sharding.mesh_axes("batch"),
            expert_axes=sharding.mesh_axes("experts"),
        )


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
