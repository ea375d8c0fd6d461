"""Verify: one target forward pass over the T tokens of a draft."""

from __future__ import annotations

import jax

from sv_jax.model.cache import KVCache
from sv_jax.model.transformer import Params, Transformer, compute_logits, forward
from sv_jax.speculation.tree import ancestor_mask, node_depths
from sv_jax.speculation.types import Draft, Verification


def verify(
    target: Transformer, params: Params, cache: KVCache, lengths: jax.Array, draft: Draft
) -> Verification:
    """Logits for every node of the draft, over the committed cache and its own ancestors.

    Args:
      cache, lengths: the committed prefix; int32[B]. The root sits at position lengths[b].
      draft: T nodes per row.

    Returns:
      Verification with logits float32[B, T, V]; the nodes' K/V is returned, not written.
    """
    with jax.named_scope("verify"):
        ancestors = ancestor_mask(draft.parents)
        positions = lengths[:, None] + node_depths(ancestors)
        hidden, new_kv = forward(target, params, draft.tokens, positions, cache, lengths, ancestors)
        logits = compute_logits(target, params, hidden)
        return Verification(target.sharding.constrain(logits, "batch", None, "vocab"), new_kv)
