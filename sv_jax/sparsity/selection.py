"""Which blocks of the cache a step reads: scores, budgets, and the choice by layer (SA, SA*)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.cache_attention.reference import masked_softmax, to_rows
from sv_jax.model.attention import BlockChooser
from sv_jax.model.cache import LayerKV
from sv_jax.model.cached_attention import Selection
from sv_jax.sharding import Sharding
from sv_jax.sparsity.plan import AttentionPlan
from sv_jax.sparsity.summaries import KEYS_PER_MEAN, STATISTICS, BlockSummaries, LayerSummary

MASS_ROWS = 64
"""Rows of scores, float32[means], that `attention_mass` holds for a KV head at once, or those of one query
head: all of a wide step would take more memory than the rest of a layer."""

LAST = jnp.iinfo(jnp.int32).max  # index of an entry past the count: no block, and sorted last


def budget_tokens(lengths: jax.Array, l0: jax.Array, rho: jax.Array) -> jax.Array:
    """int32[B]: tokens that a KV head reads of L committed ones, the paper's piecewise budget.

    L while L <= l0, floor((L - l0) * rho + l0) above.
    """
    beyond = jnp.maximum(lengths - l0, 0)
    return jnp.minimum(lengths, l0) + jnp.floor(beyond.astype(jnp.float32) * rho).astype(jnp.int32)


def count_blocks(lengths: jax.Array, block_size: int) -> jax.Array:
    """int32[B]: blocks that hold a committed token."""
    return (lengths + block_size - 1) // block_size


def oldest_visible(lengths: jax.Array, window: int | None) -> jax.Array:
    """int32[B]: the first committed position that the root, at position lengths[b], sees."""
    return jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window + 1, 0)


def score_blocks(
    score: str,
    q: jax.Array,
    summary: LayerSummary,
    lengths: jax.Array,
    nodes: jax.Array,
    block_size: int,
    window: int | None = None,
) -> jax.Array:
    """How much attention a step would pay to each block, up to a monotone function.

    Args:
      score: "mean": q0 . mean key, the paper's s[h, b] = (1/B) sum q0 . k. "bound": Quest's upper bound
        sum_i max(q0_i * low_i, q0_i * high_i) of q0 . k over the block. Both are averaged over the G query
        heads of a KV head. "mass": see `attention_mass`.
      q: [B, T, H, D] after RoPE; token 0 is the root.
      summary: see `summaries.STATISTICS`.
      lengths: int32[B], committed tokens. nodes: bool[B, T], tokens of the step that are no empty slots.
      window: the layer's sliding window. Scores of blocks outside mean nothing.

    Returns:
      float32[B, K, S / block_size].
    """
    if score == "mass":
        return attention_mass(q, summary["fine_means"], lengths, nodes, block_size, window)
    batch, kv_heads, _, head_dim = summary[STATISTICS[score][0]].shape
    root = q[:, 0].astype(jnp.float32).reshape(batch, kv_heads, -1, head_dim)
    product = partial(jnp.einsum, "bkd,bknd->bkn", precision=jax.lax.Precision.HIGHEST)
    if score == "mean":  # an average of scores is the score of the averaged query
        return product(jnp.mean(root, axis=2), summary["mean"])
    assert score == "bound", score
    above, below = (jnp.mean(clip(root, 0.0), axis=2) for clip in (jnp.maximum, jnp.minimum))
    return product(above, summary["high"]) + product(below, summary["low"])


def attention_mass(
    q: jax.Array,
    fine_means: jax.Array,
    lengths: jax.Array,
    nodes: jax.Array,
    block_size: int,
    window: int | None = None,
) -> jax.Array:
    """Estimate of the attention that the tokens of a step pay to each block. Not in the paper, which asks the
    root alone, and one mean a block.

    A few keys weigh about as much as their mean, as often as there are of them: exp(q . mean) * count. Each
    query's weights are normalised over the committed positions that the root sees, then summed over a block,
    over the G query heads and over the tokens: a head that looks at one place counts for more than one that
    looks everywhere.

    Args: as `score_blocks`; fine_means float32[B, K, S / KEYS_PER_MEAN, D].

    Returns:
      float32[B, K, S / block_size].
    """
    batch, kv_heads, num_means, _ = fine_means.shape
    rows = to_rows(q.astype(jnp.float32), kv_heads)  # [B, K, G * T, D]
    starts = KEYS_PER_MEAN * jnp.arange(num_means, dtype=jnp.int32)
    before, behind = (
        jnp.clip(end[:, None] - starts, 0, KEYS_PER_MEAN)
        for end in (oldest_visible(lengths, window), lengths)
    )
    count = (behind - before)[:, None, None].astype(jnp.float32)

    def mass_of(rows: jax.Array) -> jax.Array:  # [B, K, n * T, D] -> [B, K, means]
        scores = jax.lax.dot_general(
            rows, fine_means, (((3,), (3,)), ((0, 1), (0, 1))), precision=jax.lax.Precision.HIGHEST
        )
        scores = scores * rows.shape[3] ** -0.5 + jnp.log(count)  # -inf where no key is
        weights, total, _ = masked_softmax(scores, count > 0)
        here = jnp.tile(nodes, (1, rows.shape[2] // nodes.shape[1]))
        share = here[:, None, :, None] / jnp.where(total > 0, total, 1.0)
        return jnp.sum(weights * share, axis=2)

    if rows.shape[2] <= MASS_ROWS:
        mass = mass_of(rows)
    else:  # a query head after the other
        heads = jnp.moveaxis(rows.reshape(batch, kv_heads, -1, *q.shape[1:2], q.shape[3]), 2, 0)
        mass, _ = jax.lax.scan(
            lambda mass, head: (mass + mass_of(head), None),
            jnp.zeros((batch, kv_heads, num_means), jnp.float32),
            heads,
        )
    return jnp.sum(mass.reshape(batch, kv_heads, -1, block_size // KEYS_PER_MEAN), axis=-1)


def select_blocks(
    scores: jax.Array,
    first: jax.Array,
    held: jax.Array,
    budget: jax.Array,
    *,
    most: int,
    sink_blocks: int,
    local_blocks: int,
    sharding: Sharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The best blocks within a budget; sink and local blocks first of all.

    Args:
      scores: float32[B, K, M], M blocks of the cache.
      first, held: int32[B]; blocks first[b] .. held[b] - 1 can be read at all.
      budget: int32[B], blocks a KV head; sink and local blocks are counted inside, and are its least.
      most: N, at least every budget.
      sharding: of the batch and the KV heads; None: on one device.

    Returns:
      block_indices int32[B, K, N] ascending, num_blocks int32[B, K].
    """
    total = scores.shape[2]
    block = jnp.arange(total, dtype=jnp.int32)
    sink_blocks, local_blocks = min(sink_blocks, total), min(local_blocks, total)  # their sum fits int32
    first, held, budget = (x[:, None, None] for x in (first, held, budget))
    forced = (block < first + sink_blocks) | (block >= held - local_blocks)
    readable = (block >= first) & (block < held)
    ranked = jnp.where(readable, jnp.where(forced, jnp.inf, scores), -jnp.inf)
    available = jnp.maximum(held - first, 0)
    count = jnp.clip(jnp.maximum(budget, sink_blocks + local_blocks), 0, jnp.minimum(available, most))

    def best(ranked: jax.Array, count: jax.Array) -> jax.Array:
        _, order = jax.lax.top_k(ranked, most)
        entry = jnp.arange(most, dtype=jnp.int32)
        return jnp.sort(jnp.where(entry < count, order.astype(jnp.int32), LAST), axis=-1)

    if sharding is not None and sharding.mesh.size > 1:  # a bare top_k would gather the scores
        specs = sharding.spec("batch", "kv_heads", None), sharding.spec("batch", None, None)
        best = jax.shard_map(best, mesh=sharding.mesh, in_specs=specs, out_specs=specs[0])
    indices = best(ranked, count)
    return indices, jnp.broadcast_to(count[:, :, 0], scores.shape[:2])


BlockScorer = Callable[[int, jax.Array], jax.Array]
"""(layer, q [B, T, H, D]) -> float32[B, K, S / block_size]."""


def summary_scorer(
    plan: AttentionPlan, summaries: BlockSummaries, lengths: jax.Array, nodes: jax.Array
) -> BlockScorer:
    """Scores by the plan, from what is kept beside the cache; lengths and nodes as in `score_blocks`."""

    def score(layer: int, q: jax.Array) -> jax.Array:
        summary = summaries.layers[layer]
        assert summary is not None
        return score_blocks(plan.score, q, summary, lengths, nodes, plan.block_size, plan.windows[layer])

    return score


def make_chooser(
    plan: AttentionPlan,
    score: BlockScorer,
    lengths: jax.Array,
    live: jax.Array,
    *,
    sharding: Sharding,
) -> BlockChooser:
    """The choice of a step by the plan: anchors score and select, other layers take their anchor's set.

    Args:
      score: of the layers that select.
      lengths: int32[B], committed tokens. live: bool[B], rows whose output counts.
    """
    size = plan.block_size
    held = count_blocks(lengths, size)
    budget = count_blocks(budget_tokens(lengths, plan.l0, plan.rho), size)
    whole = jnp.all(~live | (lengths <= plan.l0)) if plan.most_l0 else None

    def choose(
        layer: int, q: jax.Array, cached: LayerKV, chosen: tuple[Selection | None, ...]
    ) -> Selection | None:
        anchor = plan.anchor_of[layer]
        if anchor is None:
            return None
        if anchor != layer:
            return chosen[anchor]
        with jax.named_scope("select"):
            scores = score(layer, q)
            first = oldest_visible(lengths, plan.windows[layer]) // size
            indices, counts = select_blocks(
                scores,
                first,
                held,
                budget,
                most=plan.most_blocks(scores.shape[2] * size),
                sink_blocks=plan.sink_blocks,
                local_blocks=plan.local_blocks,
                sharding=sharding,
            )
            return Selection(indices, counts, whole, size)

    return choose


def blocks_read(chosen: tuple[Selection | None, ...], lengths: jax.Array, kv_heads: int) -> jax.Array | None:
    """int32[B]: KV blocks that a step read, over layers and KV heads, a dense layer's in full.

    None where every layer was dense.
    """
    sizes = {selection.block_size for selection in chosen if selection is not None}
    if not sizes:
        return None
    (size,) = sizes
    held = count_blocks(lengths, size)
    total = jnp.zeros_like(lengths)
    for selection in chosen:
        total += held * kv_heads if selection is None else jnp.sum(selection.num_blocks, axis=1)
    return total
