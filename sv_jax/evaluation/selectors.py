"""What can rank blocks in a comparison: the scores that a run has, and controls that no run can have.

A control gets the same budget, the same sink and local blocks and the same anchors, hence the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.cache_attention.reference import masked_softmax, matmul_precision, to_rows
from pallas_kernels.packing import unpack_heads
from sv_jax.model.cache import LayerKV
from sv_jax.sparsity.config import SCORES
from sv_jax.sparsity.plan import AttentionPlan
from sv_jax.sparsity.selection import BlockScorer, oldest_visible, summary_scorer
from sv_jax.sparsity.summaries import BlockSummaries

CONTROLS = {
    "recent": "the newest blocks: a plain sliding window with sinks",
    "random": "blocks drawn anew for each step, layer and KV head",
    "oracle": "the blocks that the dense pass over the same tokens paid most attention to",
}
SELECTORS: tuple[str, ...] = (*SCORES, *CONTROLS)


def block_masses(
    q: jax.Array,
    cached: LayerKV,
    lengths: jax.Array,
    nodes: jax.Array,
    *,
    block_size: int,
    window: int | None = None,
) -> jax.Array:
    """float32[B, K, S / block_size]: attention that the tokens and G heads pay to each block, summed.

    Each token's and head's weights sum to 1 over the committed positions that the root sees in the layer's
    window (not the step's own tokens).

    Args:
      q: [B, T, H, D]. cached: K and V of the layer. lengths: int32[B]. nodes: bool[B, T], tokens that count.
    """
    keys = unpack_heads(cached[0], q.shape[3])
    rows = to_rows(q, keys.shape[1])
    scores = jax.lax.dot_general(
        rows,
        keys,
        (((3,), (3,)), ((0, 1), (0, 1))),
        precision=matmul_precision(keys.dtype),
        preferred_element_type=jnp.float32,
    )  # [B, K, R, S]
    slots = jnp.arange(keys.shape[2], dtype=jnp.int32)
    oldest = oldest_visible(lengths, window)
    mask = ((slots < lengths[:, None]) & (slots >= oldest[:, None]))[:, None, None]
    weights, total, _ = masked_softmax(scores * q.shape[-1] ** -0.5, mask)
    share = jnp.tile(nodes, (1, rows.shape[2] // nodes.shape[1]))[:, None, :, None]
    per_slot = jnp.sum(weights * share / jnp.where(total > 0, total, 1.0), axis=2)
    return jnp.sum(per_slot.reshape(*per_slot.shape[:2], -1, block_size), axis=-1)


def make_scorer(
    selector: str,
    plan: AttentionPlan,
    summaries: BlockSummaries,
    masses: Sequence[jax.Array],
    key: jax.Array,
    lengths: jax.Array,
    nodes: jax.Array,
) -> BlockScorer:
    """How `selector` ranks blocks.

    Args:
      summaries: of the cache, of every layer that selects.
      masses: per layer, the dense pass's `block_masses` with the plan's block size; the oracle's alone.
      key: of this step; the random control's alone.
      lengths: int32[B], committed tokens. nodes: bool[B, T], tokens of the step that exist.
    """
    if selector in SCORES:
        return summary_scorer(plan, summaries, lengths, nodes)

    def score(layer: int, q: jax.Array) -> jax.Array:
        mass = masses[layer]
        if selector == "oracle":
            return mass
        if selector == "recent":
            return jnp.broadcast_to(jnp.arange(mass.shape[2], dtype=jnp.float32), mass.shape)
        assert selector == "random", selector
        return jax.random.uniform(jax.random.fold_in(key, layer), mass.shape)

    return score
