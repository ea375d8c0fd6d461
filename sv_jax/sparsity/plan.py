"""The plan of a run: what is sparse in which layer, and how much of it is read."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from sv_jax.config import ModelConfig, UserError
from sv_jax.sparsity.channels import ChannelPlan, describe_channels, plan_channels
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig
from sv_jax.sparsity.experts import ExpertPlan, describe_experts, plan_experts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Sparse attention for one model. Budgets are arrays, everything else is static.

    `most_l0` and `most_rho` bound the budget: they give the static number of blocks that a head can read in a
    cache of some capacity. Any budget within it runs in the same program.
    """

    l0: jax.Array  # int32[]
    rho: jax.Array  # float32[]
    most_l0: int = dataclasses.field(metadata={"static": True})
    most_rho: float = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})
    sink_blocks: int = dataclasses.field(metadata={"static": True})
    local_blocks: int = dataclasses.field(metadata={"static": True})
    score: str = dataclasses.field(metadata={"static": True})
    # Per layer, the layer whose set of blocks it reads; itself where it selects; None: it reads everything.
    anchor_of: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    windows: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})  # per layer; None: none

    @property
    def anchors(self) -> tuple[int, ...]:
        """Layers that score and select."""
        return tuple(i for i, anchor in enumerate(self.anchor_of) if anchor == i)

    def most_blocks(self, capacity: int) -> int:
        """N: blocks that a KV head can read in a cache of `capacity` positions."""
        tokens = min(capacity, math.floor(max(capacity - self.most_l0, 0) * self.most_rho) + self.most_l0)
        blocks = max(-(-tokens // self.block_size), self.sink_blocks + self.local_blocks)
        return min(blocks, capacity // self.block_size)

    def with_budget(self, l0: int, rho: float) -> AttentionPlan:
        """The same plan, hence the same programs, with another budget.

        Raises UserError for a budget above the one that the plan was made with.
        """
        if not (0 <= l0 <= self.most_l0 and 0 <= rho <= self.most_rho):
            raise UserError(
                f"budget of l0={l0}, rho={rho:g}; allowed without new programs: "
                f"l0 up to {self.most_l0}, rho up to {self.most_rho:g}"
            )
        return dataclasses.replace(self, l0=jnp.int32(l0), rho=jnp.float32(rho))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparsityPlan:
    """What verification leaves out; None: nothing of that part. Passed to the jitted functions; None there
    means dense."""

    attention: AttentionPlan | None
    channels: ChannelPlan | None = None
    experts: ExpertPlan | None = None

    @property
    def sparse_ffn(self) -> bool:
        """Whether feed-forward networks or experts leave something out."""
        return self.channels is not None or self.experts is not None

    def within(self, capacity: int) -> SparsityPlan | None:
        """What is left of it in a cache of `capacity` positions: the budget may cover all of these."""
        if self.attention is None or capacity > self.attention.most_l0:
            return self
        return dataclasses.replace(self, attention=None) if self.sparse_ffn else None


def resolve_anchors(attention: AttentionSparsity, model: ModelConfig) -> tuple[int | None, ...]:
    """Per layer, the layer whose set it reads. A set is shared only by layers that see the same positions.

    Raises UserError for layers that the model does not have, or that have no anchor before them.
    """
    layers = model.num_layers
    for name, given in (("anchors", attention.anchors or ()), ("dense-layers", attention.dense_layers)):
        if beyond := [layer for layer in given if layer >= layers]:
            raise UserError(f"{name} has layer {beyond[0]}; allowed for this model: 0 to {layers - 1}")
    anchors = range(layers) if attention.anchors is None else attention.anchors
    if both := sorted(set(attention.anchors or ()) & set(attention.dense_layers)):
        raise UserError(f"layer {both[0]} is in anchors and in dense-layers; allowed: one of the two")
    resolved: list[int | None] = []
    last: dict[int | None, int] = {}  # by window
    for layer in range(layers):
        if layer in attention.dense_layers:
            resolved.append(None)
            continue
        window = model.sliding_window(layer)
        if layer in anchors:
            last[window] = layer
        if window not in last:
            raise UserError(
                f"anchors {list(anchors)}: layer {layer} has no anchor before it"
                f"{'' if window is None else f' with its window of {window}'}; allowed: "
                f"{layer} among the anchors, or among dense-layers"
            )
        resolved.append(last[window])
    return tuple(resolved)


def plan_attention(attention: AttentionSparsity, model: ModelConfig) -> AttentionPlan:
    """Raises UserError for layers that do not fit the model."""
    l0, rho = attention.budget
    return AttentionPlan(
        l0=jnp.int32(l0),
        rho=jnp.float32(rho),
        most_l0=l0,
        most_rho=rho,
        block_size=attention.block_size,
        sink_blocks=attention.sink_blocks,
        local_blocks=attention.local_blocks,
        score=attention.score,
        anchor_of=resolve_anchors(attention, model),
        windows=tuple(model.sliding_window(layer) for layer in range(model.num_layers)),
    )


def make_plan(sparsity: SparsityConfig, model: ModelConfig) -> SparsityPlan:
    """The plan for a model. Raises UserError for what does not fit it."""
    attention, ffn, experts = sparsity.attention, sparsity.ffn, sparsity.experts
    return SparsityPlan(
        attention=None if attention is None else plan_attention(attention, model),
        channels=None if ffn is None else plan_channels(ffn, model),
        experts=None if experts is None else plan_experts(experts, model),
    )


def describe(plan: SparsityPlan, model: ModelConfig) -> list[str]:
    """The plan in words, a line each."""
    lines = [] if plan.attention is None else describe_attention(plan.attention)
    if plan.channels is not None:
        lines += describe_channels(plan.channels)
    if plan.experts is not None:
        lines += describe_experts(plan.experts, model)
    return lines


def describe_attention(attention: AttentionPlan) -> list[str]:
    """The plan in words, a line each."""
    l0, rho = attention.most_l0, attention.most_rho
    if l0:
        budget = (
            f"everything up to {l0} tokens of context; beyond, {l0} tokens and {100 * rho:g} % of the rest"
        )
    else:
        budget = f"{100 * rho:g} % of the context"
    anchors, layers = attention.anchors, len(attention.anchor_of)
    dense = [layer for layer, anchor in enumerate(attention.anchor_of) if anchor is None]
    who = (
        "every layer selects"
        if len(anchors) == layers
        else (f"{len(anchors)} of {layers} layers select ({', '.join(map(str, anchors))}), others reuse")
    )
    lines = [
        f"sparse attention in verification: {budget}, a KV head, in blocks of {attention.block_size}",
        f"  {attention.sink_blocks} first and {attention.local_blocks} last blocks always, the others by "
        f"score {attention.score!r}; {who}",
    ]
    if dense:
        lines.append(f"  layers that read everything: {', '.join(map(str, dense))}")
    return lines
