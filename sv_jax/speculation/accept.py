"""Accept: which drafted tokens the target's laws keep, and the token that follows them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sv_jax.speculation.tree import ancestor_mask, node_depths, path_to
from sv_jax.speculation.types import Acceptance, Draft


def accept_greedy(draft: Draft, logits: jax.Array) -> Acceptance:
    """Keeps the longest path on which every token is the target's argmax after its parent.

    Args:
      draft: T nodes per row.
      logits: float32[B, T, V], as `verify` returns them.

    Returns:
      Acceptance; the last emitted token is the target's own argmax after the deepest kept node, so a row
      emits exactly what plain greedy decoding would (Leviathan et al. 2211.17192 at temperature 0).
    """
    with jax.named_scope("accept"):
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        after_parent = jnp.take_along_axis(best, jnp.maximum(draft.parents, 0), axis=1)
        matches = (draft.parents >= 0) & (draft.tokens == after_parent)
        matches = matches.at[:, 0].set(True)
        ancestors = ancestor_mask(draft.parents)
        kept = jnp.all(matches[:, None, :] | ~ancestors, axis=-1)
        depth = jnp.where(kept, node_depths(ancestors), -1)
        deepest = jnp.argmax(depth, axis=-1).astype(jnp.int32)
        num_accepted = jnp.take_along_axis(depth, deepest[:, None], axis=1)[:, 0]
        path = path_to(ancestors, deepest)

        # path = [root, d1, .., da, ..] -> tokens = [d1, .., da, bonus, ..]
        drafted = jnp.take_along_axis(draft.tokens, jnp.roll(path, -1, axis=1), axis=1)
        bonus = jnp.take_along_axis(best, deepest[:, None], axis=1)
        slots = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)
        tokens = jnp.where(slots == num_accepted[:, None], bonus, drafted)
        return Acceptance(tokens, num_accepted + 1, path)
