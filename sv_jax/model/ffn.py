"""The gated feed-forward network: down(silu(gate(x)) * up(x)); all of its channels, or those that matter."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sv_jax.config import ModelConfig
from sv_jax.model.layers import Linear, take_channels
from sv_jax.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerChannels:
    """The channels that a layer's networks leave out in a step (SFFN of arXiv 2512.21911).

    rule:
      "gate": of each token, those with |silu(gate)| below the threshold (the paper); up and down have no use
        for them.
      "product": of each token, those with |silu(gate) * up| below the threshold; down has no use for them.
      "shared": of all tokens of the step together, all but the share `keep` with the largest sum of
        |silu(gate)| over tokens. These alone are read of up and down: the only rule that saves bytes.
      "oracle": as "shared", by |silu(gate) * up|: a control, which reads all of up to know that.
    """

    threshold: jax.Array  # float32[]
    votes: jax.Array | None  # float32[F] (or more): what "shared" ranks channels by in place of its measure
    rule: str = dataclasses.field(metadata={"static": True})
    keep: float = dataclasses.field(metadata={"static": True})  # of the rule "shared"

    def count(self, size: int, shards: int = 1) -> int:
        """Channels that the rule "shared" keeps of `size`: as many on each of `shards`."""
        return shards * math.ceil(self.keep * (size // shards))


class ChannelReads(NamedTuple):
    """What a step used of its channels, int32[] each; a token that does not count uses none."""

    used: jax.Array  # channels of each token, summed over tokens: what arithmetic is worth doing
    most_used: jax.Array  # the same with nothing left out
    wanted: jax.Array  # channels that some token uses: what is worth reading
    held: jax.Array  # channels that there are


def all_channels(size: int, live: jax.Array) -> ChannelReads:
    """Of a network of `size` channels that leaves nothing out; live bool[..]: tokens that count."""
    tokens = jnp.sum(live, dtype=jnp.int32)
    everything, each = tokens * size, jnp.int32(size)
    return ChannelReads(everything, everything, each, each)


def masked_channels(kept: jax.Array, live: jax.Array) -> ChannelReads:
    """kept: bool[.., F], channels that each token uses. live: bool[..], tokens that count."""
    kept = kept & live[..., None]
    wanted = jnp.any(kept, axis=tuple(range(kept.ndim - 1)))
    whole = all_channels(kept.shape[-1], live)
    return whole._replace(used=jnp.sum(kept, dtype=jnp.int32), wanted=jnp.sum(wanted, dtype=jnp.int32))


def keep_channels(
    channels: LayerChannels, activated: jax.Array, product: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`product` with zeros in the channels that a threshold leaves out, and which it keeps, bool[.., F].

    Args:
      activated: silu(gate) [.., F]. product: activated * up [.., F].
    """
    measure = activated if channels.rule == "gate" else product
    kept = jnp.abs(measure.astype(jnp.float32)) >= channels.threshold
    return jnp.where(kept, product, jnp.zeros((), product.dtype)), kept


def channel_votes(measure: jax.Array, live: jax.Array) -> jax.Array:
    """float32[F]: how much each channel matters to all tokens together.

    Args:
      measure: [.., F]. live: bool[..]: tokens that have a say.
    """
    votes = jnp.where(live[..., None], jnp.abs(measure.astype(jnp.float32)), 0.0)
    return jnp.sum(votes, axis=tuple(range(live.ndim)))


def rank_channels(votes: jax.Array, count: int, shards: int) -> jax.Array:
    """The channels with most votes, as many of every shard of the model axis.

    Args:
      votes: float32[F].
      count: how many, a multiple of `shards`, which divides F.

    Returns:
      int32[shards, count / shards], ascending within each shard's F / shards channels.
    """
    _, best = jax.lax.top_k(votes.reshape(shards, -1), count // shards)
    return jnp.sort(best.astype(jnp.int32), axis=-1)


class FeedForward(nn.Module):
    """SwiGLU over F channels, x [B, T, d] -> [B, T, d]."""

    config: ModelConfig
    dtype: str
    sharding: Sharding
    size: int | None = None  # F; None: the config's

    @nn.compact
    def __call__(
        self, x: jax.Array, live: jax.Array | None = None, channels: LayerChannels | None = None
    ) -> tuple[jax.Array, ChannelReads | None]:
        """The output, and what was used of the channels where some are left out.

        Args:
          live: bool[B, T], tokens that count; None: all do.
          channels: None: all of them.
        """
        config, size = self.config, self.size or self.config.intermediate_size

        def linear(name: str, features: int, axes: tuple[str, str], inputs: int | None = None) -> Linear:
            return Linear(features, axes, config.mlp_bias, self.dtype, in_features=inputs, name=name)

        activated = nn.silu(linear("gate", size, ("embed", "ffn"))(x))
        self.sow("intermediates", "activated", activated)
        up = linear("up", size, ("embed", "ffn"))
        down = linear("down", config.hidden_size, ("ffn", "embed"), size)
        if channels is None:
            product = activated * up(x)
            self.sow("intermediates", "product", product)
            return down(product), None
        live = jnp.ones(x.shape[:2], bool) if live is None else live
        if channels.rule in ("shared", "oracle"):
            shards = self.sharding.model_size
            count = channels.count(size, shards)
            votes = channel_votes(activated, live) if channels.votes is None else channels.votes[:size]
            if channels.rule == "oracle":
                votes = channel_votes(activated * up(x), live)
            chosen = rank_channels(votes, count, shards)
            product = take_channels(activated, chosen, axis=2) * up(x, outputs=chosen)
            used = all_channels(count, live)
            reads = all_channels(size, live)._replace(used=used.used, wanted=used.wanted)
            return down(product, inputs=chosen), reads
        product, kept = keep_channels(channels, activated, activated * up(x))
        return down(product), masked_channels(kept, live)
