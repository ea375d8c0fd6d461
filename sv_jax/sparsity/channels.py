"""Sparse feed-forward networks (SFFN): which channels each layer leaves out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sv_jax.config import ModelConfig, UserError
from sv_jax.model.ffn import LayerChannels
from sv_jax.sparsity.ffn_config import ChannelSparsity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelPlan:
    """For one model. Thresholds are an array: other ones run in the same program."""

    thresholds: jax.Array  # float32[L]
    rule: str = dataclasses.field(metadata={"static": True})
    keep: float = dataclasses.field(metadata={"static": True})
    dense_layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def of_layer(self, layer: int) -> LayerChannels | None:
        """What layer `layer` leaves out; None: nothing."""
        if layer in self.dense_layers:
            return None
        return LayerChannels(self.thresholds[layer], None, self.rule, self.keep)


def plan_channels(sparsity: ChannelSparsity, model: ModelConfig) -> ChannelPlan:
    """Raises UserError for layers that the model does not have, or as many thresholds as it has no layers."""
    layers = model.num_layers
    if beyond := [layer for layer in sparsity.dense_layers if layer >= layers]:
        raise UserError(f"ffn dense-layers has layer {beyond[0]}; allowed for this model: 0 to {layers - 1}")
    given = sparsity.thresholds or (0.0,)
    if len(given) not in (1, layers):
        raise UserError(f"ffn thresholds has {len(given)} numbers; allowed for this model: 1, or {layers}")
    return ChannelPlan(
        thresholds=jnp.broadcast_to(jnp.asarray(given, jnp.float32), (layers,)),
        rule=sparsity.rule,
        keep=1.0 if sparsity.keep is None else sparsity.keep,
        dense_layers=sparsity.dense_layers,
    )


def describe_channels(plan: ChannelPlan) -> list[str]:
    """The plan in words, a line each."""
    if plan.rule == "shared":
        what = (
            f"of all tokens of a step together the {100 * plan.keep:g} % of the channels with the largest "
            "|silu(gate)|; no others are read of up and down"
        )
    else:
        low, high = (f"{float(f(plan.thresholds)):.3g}" for f in (jnp.min, jnp.max))
        measure = "|silu(gate)|" if plan.rule == "gate" else "|silu(gate) * up|"
        bounds = low if low == high else f"{low} to {high}, by layer"
        what = (
            f"of each token the channels with {measure} of at least {bounds}; others count as 0, which "
            "saves no bytes here"
        )
    lines = [f"sparse feed-forward networks in verification: {what}"]
    if plan.dense_layers:
        lines.append(f"  layers that use all channels: {', '.join(map(str, plan.dense_layers))}")
    return lines
