"""Experts of a mixture: the products of the tokens that were sent to each, none of them dropped.

Tokens are sorted by expert and cut into tiles of one expert each; a loop runs over the tiles that there are.
Its trip count is data, every shape is static, and an expert that nobody wants is not read. The few tokens of
a verify step make one tile for each active expert, those of prefill several. On TPU, where sorting and
gathering cost more than they save, a tile of a verify step has all tokens, and the many tokens of prefill
take three ragged products (`pallas_kernels/platform.py` decides).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.cache_attention.reference import matmul_precision
from pallas_kernels.platform import expert_products
from sv_jax.model.ffn import (
    ChannelReads,
    LayerChannels,
    all_channels,
    channel_votes,
    keep_channels,
    masked_channels,
    rank_channels,
)
from sv_jax.model.layers import multiply, take_channels

TILE_STEP, LARGEST_TILE = 8, 256  # tokens


class Routing(NamedTuple):
    """Where tokens go."""

    experts: jax.Array  # int32[B, T, k]; num_experts: nowhere
    weights: jax.Array  # float32[B, T, k]


class ExpertWeights(NamedTuple):
    """E experts; of a shard, its own ones."""

    gate: jax.Array  # [E, d, F]
    up: jax.Array  # [E, d, F]
    down: jax.Array  # [E, F, d]


class Pairs(NamedTuple):
    """The pairs of a token and one of its k experts, sorted by expert and then by token."""

    order: jax.Array  # int32[N * k]: token * k + rank; pairs that go nowhere come last
    counts: jax.Array  # int32[E]: pairs of each expert
    firsts: jax.Array  # int32[E]: where each expert's begin in `order`


def sort_pairs(experts: jax.Array, num_experts: int) -> Pairs:
    """Pairs by expert, of int32[N, k] experts; those past the last one are nowhere."""
    chosen = experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    counts = jnp.zeros(num_experts, jnp.int32).at[chosen].add(1, mode="drop")
    return Pairs(order, counts, jnp.cumsum(counts) - counts)


def tile_size(num_tokens: int, num_experts: int, experts_per_token: int) -> int:
    """Tokens of a tile: what an expert gets and a little more, so that most need one tile, hardly empty.

    The little is a standard deviation of what experts get from an even router. Many tokens are cut into equal
    tiles of at most LARGEST_TILE.
    """
    mean = num_tokens * experts_per_token / num_experts
    room = mean + math.sqrt(mean)
    tiles = math.ceil(room / LARGEST_TILE)
    size = TILE_STEP * math.ceil(room / tiles / TILE_STEP)
    return min(size, num_tokens)


def take_expert(weights: ExpertWeights, expert: jax.Array) -> ExpertWeights:
    """One expert's gate [d, F], up [d, F] and down [F, d]; for a loop whose step decides `expert`."""
    # XLA's CPU compiler slices bfloat16 as float32. Without the barrier it converts all experts' weights, in
    # front of the loop, in every call: 6 times as slow as what is here (scripts/bench_moe.py).
    weights, expert = jax.lax.optimization_barrier((weights, expert))
    return ExpertWeights(*(jax.lax.dynamic_index_in_dim(w, expert, 0, keepdims=False) for w in weights))


def run_experts(
    x: jax.Array, routing: Routing, weights: ExpertWeights, channels: LayerChannels | None = None
) -> tuple[jax.Array, ChannelReads | None]:
    """The weighted sum of each token's experts, float32[N, d], and what was used of their channels.

    Args:
      x: [N, d]. routing: of N tokens, [N, k] each, with experts from 0; those past the last one are nowhere.
      weights: E experts.
      channels: which ones experts leave out, each for itself and, where tokens share them, each tile's; None:
        none, and nothing is counted.
    """
    num_tokens, per_token = routing.experts.shape
    num_experts, total = weights.gate.shape[0], routing.experts.size
    size = tile_size(num_tokens, num_experts, per_token)
    pairs = sort_pairs(routing.experts, num_experts)
    tiles = (pairs.counts + size - 1) // size
    ends = jnp.cumsum(tiles)  # of each expert's tiles

    def run_tile(tile: jax.Array, carry: Carry) -> Carry:
        y, reads = carry
        expert = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
        done = (tile - (ends[expert] - tiles[expert])) * size  # of this expert's tokens
        slots = done + jnp.arange(size, dtype=jnp.int32)
        there = slots < pairs.counts[expert]
        taken = pairs.order[jnp.minimum(pairs.firsts[expert] + slots, total - 1)]
        tokens = jnp.where(there, taken // per_token, num_tokens)  # past the end: nobody
        rows = jnp.take(x, tokens, axis=0, mode="clip")
        out, tile_reads = run_network(rows, take_expert(weights, expert), there, channels)
        share = routing.weights.reshape(-1)[taken]
        y = y.at[tokens].add(share[:, None] * out, mode="drop")
        return y, jax.tree.map(jnp.add, reads, tile_reads)

    return jax.lax.fori_loop(0, ends[-1], run_tile, _nothing_yet(x, channels))


Carry = tuple[jax.Array, ChannelReads | None]


def _nothing_yet(x: jax.Array, channels: LayerChannels | None) -> Carry:
    none = None if channels is None else ChannelReads(*[jnp.int32(0)] * len(ChannelReads._fields))
    return jnp.zeros(x.shape, jnp.float32), none


def run_experts_whole(
    x: jax.Array, routing: Routing, weights: ExpertWeights, channels: LayerChannels | None = None
) -> tuple[jax.Array, ChannelReads | None]:
    """`run_experts` with all tokens in every active expert's tile: nothing is sorted, gathered or scattered.

    For tokens so few that multiplying all of them by an expert takes no longer than reading it.
    """
    numbers = jnp.arange(weights.gate.shape[0], dtype=jnp.int32)
    goes = routing.experts == numbers[:, None, None]  # [E, N, k]
    shares = jnp.sum(jnp.where(goes, routing.weights, 0.0), axis=-1)
    sent = jnp.any(goes, axis=-1)  # [E, N]
    active = jnp.cumsum(jnp.any(sent, axis=-1), dtype=jnp.int32)  # up to and with each expert

    def run_expert(number: jax.Array, carry: Carry) -> Carry:
        y, reads = carry
        expert = jnp.sum(active <= number, dtype=jnp.int32)
        there, share = (jax.lax.dynamic_index_in_dim(a, expert, 0, keepdims=False) for a in (sent, shares))
        out, expert_reads = run_network(x, take_expert(weights, expert), there, channels)
        # What the others make of this expert is not theirs, NaN in their padding neither.
        y = y + jnp.where(there[:, None], share[:, None] * out, 0.0)
        return y, jax.tree.map(jnp.add, reads, expert_reads)

    return jax.lax.fori_loop(0, active[-1], run_expert, _nothing_yet(x, channels))


def run_network(
    rows: jax.Array, weights: ExpertWeights, there: jax.Array, channels: LayerChannels | None
) -> tuple[jax.Array, ChannelReads | None]:
    """One expert's network on its tokens, float32[n, d].

    Args:
      rows: [n, d]. weights: gate [d, F], up [d, F], down [F, d]. there: bool[n], rows that count.
    """
    gate, up, down = weights
    activated = nn.silu(multiply(rows, gate).astype(rows.dtype))
    if channels is not None and channels.rule in ("shared", "oracle"):
        size = gate.shape[1]
        votes = channel_votes(activated, there) if channels.votes is None else channels.votes[:size]
        if channels.rule == "oracle":
            votes = channel_votes(activated * multiply(rows, up).astype(rows.dtype), there)
        count = channels.count(size)
        chosen = rank_channels(votes, count, 1)
        up, activated = (take_channels(a, chosen, axis=1) for a in (up, activated))
        product = activated * multiply(rows, up).astype(rows.dtype)
        used, whole = all_channels(count, there), all_channels(size, there)
        reads = whole._replace(used=used.used, wanted=used.wanted)
        return multiply(product, take_channels(down, chosen, axis=0)), reads
    product = activated * multiply(rows, up).astype(rows.dtype)
    if channels is None:
        return multiply(product, down), None
    product, kept = keep_channels(channels, activated, product)
    return multiply(product, down), masked_channels(kept, there)


def run_experts_ragged(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    """`run_experts` in three ragged products over all pairs: what TPUs have an instruction for.

    Where they are expanded into dense ones, as on CPU, experts that nobody wants are multiplied by zeros.
    """
    per_token = routing.experts.shape[1]
    pairs = sort_pairs(routing.experts, weights.gate.shape[0])
    tokens = pairs.order // per_token
    # Rows past the last group have no expert, and what a product leaves in them is not defined: NaN maybe.
    there = (jnp.arange(len(tokens)) < jnp.sum(pairs.counts))[:, None]

    def product(rows: jax.Array, w: jax.Array) -> jax.Array:
        precision = matmul_precision(w.dtype)
        return jax.lax.ragged_dot(rows, w, pairs.counts, precision, jnp.float32)

    rows = jnp.take(x, tokens, axis=0)
    gated, linear = (product(rows, w).astype(x.dtype) for w in (weights.gate, weights.up))
    out = product(nn.silu(gated) * linear, weights.down)
    share = routing.weights.reshape(-1)[pairs.order]
    return jnp.zeros(x.shape, jnp.float32).at[tokens].add(jnp.where(there, share[:, None] * out, 0.0))


def multiply_experts(
    platform: str,
    x: jax.Array,
    routing: Routing,
    weights: ExpertWeights,
    channels: LayerChannels | None = None,
) -> tuple[jax.Array, ChannelReads | None]:
    """`run_experts` as `platform` ("cpu", "gpu", "tpu") does it fastest."""
    products = expert_products(platform, x.shape[0])
    if products == "ragged" and channels is None:
        return run_experts_ragged(x, routing, weights), None
    return (run_experts_whole if products == "whole" else run_experts)(x, routing, weights, channels)


def _gather_tokens(x: jax.Array, routing: Routing, axes: tuple[str, ...]) -> tuple[jax.Array, Routing]:
    """The tokens of all devices along `axes`, in two collectives."""
    bits = jax.lax.bitcast_convert_type(routing.weights, jnp.int32)
    packed = jnp.concatenate([routing.experts, bits], axis=-1)
    x, packed = jax.lax.all_gather((x, packed), axes, axis=0, tiled=True)
    experts, bits = jnp.split(packed, 2, axis=-1)
    return x, Routing(experts, jax.lax.bitcast_convert_type(bits, jnp.float32))


def run_sharded_experts(
    x: jax.Array,
    routing: Routing,
    weights: ExpertWeights,
    channels: LayerChannels | None = None,
    *,
    mesh: Mesh,
    batch_axes: tuple[str, ...],
    expert_axes: tuple[str, ...],
) -> tuple[jax.Array, ChannelReads | None]:
    """The weighted sum of each token's experts, float32[B, T, d], wherever rows and experts live; and what
    was used of their channels on all devices, see `run_experts`.

    Each device runs its own experts on the tokens of its rows. Tokens travel only over axes that cut both:
    there the rows of all devices are gathered, and their sums scattered again.

    Args:
      x: [B, T, d], rows over `batch_axes`. routing: [B, T, k], the same way.
      weights: E experts, over `expert_axes`.
      mesh: has both kinds of axes. `()` for what is whole on each device.
    """
    platform = mesh.devices.flat[0].platform

    def run(
        x: jax.Array, routing: Routing, weights: ExpertWeights, channels: LayerChannels | None
    ) -> tuple[jax.Array, ChannelReads | None]:
        flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), routing)
        y, reads = multiply_experts(platform, x.reshape(-1, x.shape[-1]), flat, weights, channels)
        return y.reshape(x.shape), reads

    if mesh.size == 1:
        return run(x, routing, weights, channels)
    shared = tuple(axis for axis in expert_axes if axis in batch_axes)
    others = tuple(axis for axis in expert_axes if axis not in batch_axes)
    every = (*batch_axes, *others)

    def run_shard(
        x: jax.Array, routing: Routing, weights: ExpertWeights, channels: LayerChannels | None
    ) -> tuple[jax.Array, ChannelReads | None]:
        own = weights.gate.shape[0]
        if shared:
            x, routing = _gather_tokens(x, routing, shared)
        first = jax.lax.axis_index(expert_axes) * own if expert_axes else 0
        local = routing.experts - first
        local = jnp.where((local >= 0) & (local < own), local, own)
        y, reads = run(x, Routing(local, routing.weights), weights, channels)
        if shared:
            y = jax.lax.psum_scatter(y, shared, scatter_dimension=0, tiled=True)
        if reads is not None and every:
            reads = jax.lax.psum(reads, every)
        return jax.lax.psum(y, others) if others else y, reads

    by_batch, by_expert = PartitionSpec(batch_axes or None), PartitionSpec(expert_axes or None)
    everywhere = PartitionSpec()
    # Shards run through different numbers of tiles: what varies over the mesh is not followed in loops.
    sharded = jax.shard_map(
        run_shard,
        mesh=mesh,
        in_specs=(by_batch, by_batch, by_expert, everywhere),
        out_specs=(by_batch, everywhere),
        check_vma=False,
    )
    return sharded(x, routing, weights, channels)
