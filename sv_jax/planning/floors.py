"""What one verify step has to read and to multiply on each chip, and the least time that this takes.

A floor is no forecast: the chip's published rates, nothing but reading and matrix products, no collective, no
write, nothing that waits. Real steps are slower.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from sv_jax.engine.ffn_reads import weight_channels
from sv_jax.planning.deployment import Deployment
from sv_jax.planning.footprint import Kind, Weights, tokens_of_experts, weights_by_kind
from sv_jax.planning.hardware import Chip
from sv_jax.sparsity.plan import AttentionPlan, SparsityPlan
from sv_jax.sparsity.reads import kv_bytes, summary_bytes
from sv_jax.sparsity.summaries import vectors_per_block

Verification = Literal["dense", "sparse"]
NETWORKS: tuple[Kind, ...] = ("feed-forward", "shared experts")  # that every token of a step goes through


@dataclasses.dataclass(frozen=True)
class Part:
    """Of one chip in one step."""

    name: str
    bytes: float  # read
    flops: float = 0.0  # of matrix products, a multiplication and an addition each

    def floor_ms(self, chip: Chip) -> float:
        return 1e3 * max(self.bytes / chip.bandwidth, self.flops / chip.matrix_rate)


@dataclasses.dataclass(frozen=True)
class Step:
    """A verify step of all rows.

    width: T, tokens of a row. experts_per_layer: that are read on one chip, expected; None: there are none.
    """

    verification: Verification
    width: int
    parts: tuple[Part, ...]
    experts_per_layer: float | None

    @property
    def total(self) -> Part:
        """All parts together: they may overlap, so that the floor is below the sum of theirs."""
        return Part("total", sum(p.bytes for p in self.parts), sum(p.flops for p in self.parts))


def make_step(
    deployment: Deployment, verification: Verification, width: int, plan: SparsityPlan | None = None
) -> Step:
    """A step of `width` tokens a row with the context full.

    Args:
      plan: what a sparse step leaves out; None where it is dense.
    """
    weights = weights_by_kind(deployment)
    plan = None if plan is None else plan.within(deployment.max_model_len)
    experts = expert_work(deployment, width, plan)
    parts = [
        *_attention_parts(deployment, weights, width, plan),
        *_feed_forward_parts(deployment, weights, width, plan, experts),
        _head(deployment, weights, width),
        Part("norms", weights["norms"].bytes),
    ]
    read = None if experts is None else experts.read
    return Step(verification, width, tuple(part for part in parts if part.bytes), read)


def _product(name: str, weights: Weights, tokens: float) -> Part:
    return Part(name, weights.bytes, 2 * weights.matrix_numbers * tokens)


def _head(deployment: Deployment, weights: dict[Kind, Weights], width: int) -> Part:
    """Of an embedding that is not the head only the step's rows are read: they are left out."""
    table = weights.get("head", weights["embedding"])
    return _product("head", table, deployment.rows * width)


# The cache.


def _attention_parts(
    deployment: Deployment, weights: dict[Kind, Weights], width: int, plan: SparsityPlan | None
) -> list[Part]:
    config, rows, length = deployment.config, deployment.rows, deployment.max_model_len
    attention = None if plan is None else plan.attention
    of_row = sum(
        read_positions(attention, config.sliding_window(layer), layer, length)
        for layer in range(config.num_layers)
    )
    # Of selected blocks a chip has its share only on average.
    positions = of_row / deployment.shards("kv_length")
    one = kv_bytes(config, deployment.itemsize) * deployment.kv_padding
    among_step = config.num_layers * width
    products = 4 * rows * width * deployment.heads * config.head_dim
    parts = [
        _product("attention weights", weights["attention"], rows * width),
        Part("K/V cache", rows * deployment.kv_heads * positions * one, products * (positions + among_step)),
    ]
    if attention is not None:
        shards = deployment.shards("kv_heads") * deployment.shards("kv_length")
        size = rows * int(summary_bytes(attention, config, length)) / shards
        blocks = -(-length // attention.block_size) / deployment.shards("kv_length")
        vectors = blocks * vectors_per_block(attention.score, attention.block_size)
        # All tokens' heads ask for the mass; for other scores the root does, its heads of a group averaged.
        asking = width * deployment.heads if attention.score == "mass" else deployment.kv_heads
        scoring = 2 * rows * asking * config.head_dim * vectors * len(attention.anchors)
        parts.append(Part("block summaries", size, scoring))
    return parts


def read_positions(plan: AttentionPlan | None, window: int | None, layer: int, length: int) -> int:
    """Cached positions that a KV head of layer `layer` reads with `length` tokens committed.

    Whole blocks in a sparse step, as `engine.trace.count_reads` counts them.

    Args:
      plan: None: the step is dense. window: the layer's sliding one.
    """
    oldest = 0 if window is None else max(length - window + 1, 0)
    if plan is None:
        return length - oldest
    size = plan.block_size
    available = -(-length // size) - oldest // size
    if plan.anchor_of[layer] is None:
        return available * size
    beyond = np.float32(max(length - plan.most_l0, 0)) * np.float32(plan.most_rho)  # as the device rounds
    tokens = min(length, plan.most_l0) + math.floor(beyond)
    budget = max(-(-tokens // size), plan.sink_blocks + plan.local_blocks)
    return min(budget, available) * size


# Feed-forward networks and experts.


def expected_experts(experts: float, per_token: float, tokens: float) -> float:
    """Different experts that `tokens` tokens wake, each `per_token` of `experts`, if the router is even:
    E * (1 - (1 - k / E) ** n). Routers that are less even wake fewer."""
    return experts * (1 - (1 - min(per_token / experts, 1.0)) ** tokens) if experts else 0.0


@dataclasses.dataclass(frozen=True)
class ExpertWork:
    """Of one layer on one chip in one step, expected."""

    read: float  # experts
    pairs: float  # of a token and an expert that it goes to


def expert_work(deployment: Deployment, width: int, plan: SparsityPlan | None) -> ExpertWork | None:
    """What a step of `width` tokens a row asks of the experts, if the router is even; None: there are none.

    What skipping by betas leaves out depends on the tokens, and is not in here.
    """
    moe = deployment.config.moe
    if moe is None:
        return None
    tokens, share = tokens_of_experts(deployment, width), 1 / deployment.shards("experts")
    sparse = None if plan is None else plan.experts
    per_token = moe.num_experts_per_tok if sparse is None else int(sparse.experts_per_token)
    awake = expected_experts(moe.num_experts, per_token, tokens)
    pairs = float(tokens * per_token)
    if sparse is not None and sparse.shortlist is not None:
        listed = int(sparse.shortlist)
        if sparse.outside == "repick":
            awake = expected_experts(listed, per_token, tokens)
            pairs = float(tokens * min(per_token, listed))
        elif listed < awake:  # truncate: those that are listed keep theirs
            awake, pairs = listed, pairs * listed / awake
    if sparse is not None and sparse.capacity_factor is not None:
        pairs *= min(1.0, sparse.capacity_factor)
    return ExpertWork(share * awake, share * pairs)


def _feed_forward_parts(
    deployment: Deployment,
    weights: dict[Kind, Weights],
    width: int,
    plan: SparsityPlan | None,
    experts: ExpertWork | None,
) -> list[Part]:
    config, tokens = deployment.config, deployment.rows * width
    channels = None if plan is None else plan.channels
    vector = config.hidden_size  # numbers of a channel in one matrix
    parts = []
    if networks := [weights[kind] for kind in NETWORKS if kind in weights]:
        shards = deployment.shards("ffn")
        every, kept = (weight_channels(chosen, config, 1, 0, shards) for chosen in (None, channels))
        left_out = (every - kept) * vector // shards
        size = sum(part.bytes for part in networks) - left_out * deployment.itemsize
        numbers = sum(part.matrix_numbers for part in networks) - left_out
        parts.append(Part("feed-forward", size, 2 * numbers * tokens))
    if config.moe is not None and experts is not None:
        layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
        one = weight_channels(channels, config, 0, 1, 1) * vector
        read, flops = experts.read * one * deployment.itemsize, 2 * experts.pairs * one
        parts.append(Part("experts", layers * read, layers * flops))
        parts.append(_product("router", weights["router"], tokens))
    return parts
