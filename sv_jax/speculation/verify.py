"""Verify: one target forward pass over the T tokens of a draft."""

from __future__ import annotations

import jax

from sv_jax.model.attention import BlockChooser
from sv_jax.model.cache import KVCache
from sv_jax.model.transformer import Params, Transformer, compute_logits, forward
from sv_jax.sparsity.selection import blocks_read
from sv_jax.speculation.tree import ancestor_mask, existing_nodes, node_depths
from sv_jax.speculation.types import Draft, Verification


def verify(
    target: Transformer,
    params: Params,
    cache: KVCache,
    lengths: jax.Array,
    draft: Draft,
    choose: BlockChooser | None = None,
    finished: jax.Array | None = None,
) -> Verification:
    """Logits for every node of the draft, over the committed cache and its own ancestors.

    Args:
      cache, lengths: the committed prefix; int32[B]. The root sits at position lengths[b].
      draft: T nodes per row.
      choose: which blocks of the cache each layer reads (`sparsity.selection.make_chooser`): lossy, unless it
        chooses all of them. None: dense.
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
        hidden, new_kv, chosen = forward(
            target, params, draft.tokens, positions, cache, lengths, ancestors, choose, live
        )
        logits = target.sharding.constrain(compute_logits(target, params, hidden), "batch", None, "vocab")
        reads = blocks_read(chosen, lengths, target.config.num_kv_heads)
        return Verification(logits, new_kv, reads)
