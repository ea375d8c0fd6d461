"""Verify: one target forward pass over the T tokens of a draft."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sv_jax.model.cache import KVCache
from sv_jax.model.choices import DENSE, Choices
from sv_jax.model.moe import FFNReads
from sv_jax.model.transformer import Params, Transformer, compute_logits, forward
from sv_jax.sparsity.selection import blocks_read
from sv_jax.speculation.tree import ancestor_mask, existing_nodes, node_depths
from sv_jax.speculation.types import Draft, StepReads, Verification


def verify(
    target: Transformer,
    params: Params,
    cache: KVCache,
    lengths: jax.Array,
    draft: Draft,
    choices: Choices = DENSE,
    finished: jax.Array | None = None,
) -> Verification:
    """Logits for every node of the draft, over the committed cache and its own ancestors.

    Args:
      cache, lengths: the committed prefix; int32[B]. The root sits at position lengths[b].
      draft: T nodes per row.
      choices: what each layer leaves out (`sparsity.step.make_choices`): lossy, unless that is nothing.
      finished: bool[B], rows whose output does not count. None: all do.

    Returns:
      Verification with logits float32[B, T, V]; the nodes' K/V is returned, not written.
    """
    with jax.named_scope("verify"):
        ancestors = ancestor_mask(draft.parents)
        positions = lengths[:, None] + node_depths(ancestors)
        live = existing_nodes(draft.parents)
        if finished is not None:
            live = live & ~finished[:, None]
        hidden, new_kv, chosen, ffn = forward(
            target, params, draft.tokens, positions, cache, lengths, ancestors, choices, live
        )
        logits = target.sharding.constrain(compute_logits(target, params, hidden), "batch", None, "vocab")
        kv_blocks = blocks_read(chosen, lengths, target.config.num_kv_heads)
        return Verification(logits, new_kv, _sum_reads(kv_blocks, ffn))


def _sum_reads(kv_blocks: jax.Array | None, ffn: Sequence[FFNReads]) -> StepReads:
    """What all layers read together."""
    experts = [layer.experts for layer in ffn if layer.experts is not None]
    channels = [layer.channels for layer in ffn if layer.channels is not None]

    def total(*counts: jax.Array) -> jax.Array:
        return jnp.sum(jnp.stack(counts), axis=0)

    def wide_total(*counts: jax.Array) -> jax.Array:  # over many tokens and layers int32 may not do
        return total(*(count.astype(jnp.float32) for count in counts))

    return StepReads(
        kv_blocks,
        jax.tree.map(total, *experts) if experts else None,
        jax.tree.map(wide_total, *channels) if channels else None,
    )
