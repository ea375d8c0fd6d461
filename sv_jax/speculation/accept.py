"""Accept: which drafted tokens the target's laws keep, and the token that follows them.

Deterministic drafts (q = 1 on their token) are accepted where the target's own draw is that token: the
probability is p(token), and what is drawn otherwise follows p without it, renormalised, as rejection sampling
has it (Leviathan et al. 2211.17192). The draw depends on seed and position alone, so that the emitted text is
the one of plain decoding with the same seed. Drafts drawn from laws go through rejection sampling.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sv_jax.speculation.sampling import (
    Purpose,
    draw_tokens,
    gumbel_noise,
    likeliest,
    position_keys,
    target_law,
)
from sv_jax.speculation.tree import ancestor_mask, node_depths, path_to
from sv_jax.speculation.types import Acceptance, Draft, Sampling


def accept(draft: Draft, logits: jax.Array, sampling: Sampling, lengths: jax.Array) -> Acceptance:
    """The path through the draft that the target keeps, and the token behind it.

    Args:
      draft: T nodes per row.
      logits: float32[B, T, V] after `process_logits`.
      lengths: int32[B], the root's position.

    Returns:
      Acceptance. The emitted tokens follow the law of plain decoding: exactly at temperature 0, in
      distribution otherwise, and draw by draw where the draft is deterministic.
    """
    with jax.named_scope("accept"):
        ancestors = ancestor_mask(draft.parents)
        next_positions = lengths[:, None] + node_depths(ancestors) + 1
        if draft.probs is None:
            return accept_matching(draft, draw_tokens(logits, sampling, next_positions))
        # A batch without sampled rows needs no laws: the argmax decides whether a draft is right.
        return jax.lax.cond(
            jnp.any(sampling.temperature > 0),
            lambda: accept_by_rejection(draft, logits, sampling, next_positions),
            lambda: accept_matching(draft, likeliest(logits)),
        )


def accept_matching(draft: Draft, following: jax.Array) -> Acceptance:
    """Keeps the longest path on which every token is the one that the target draws after its parent.

    Args:
      draft: T nodes per row.
      following: int32[B, T], the target's token after each node.

    Returns:
      Acceptance; the last emitted token is the target's own after the deepest kept node.
    """
    after_parent = jnp.take_along_axis(following, jnp.maximum(draft.parents, 0), axis=1)
    matches = (draft.parents >= 0) & (draft.tokens == after_parent)
    matches = matches.at[:, 0].set(True)
    ancestors = ancestor_mask(draft.parents)
    kept = jnp.all(matches[:, None, :] | ~ancestors, axis=-1)
    depth = jnp.where(kept, node_depths(ancestors), -1)
    deepest = jnp.argmax(depth, axis=-1).astype(jnp.int32)
    last = jnp.take_along_axis(following, deepest[:, None], axis=1)[:, 0]
    return _acceptance(draft, ancestors, deepest, last)


def _acceptance(draft: Draft, ancestors: jax.Array, deepest: jax.Array, last: jax.Array) -> Acceptance:
    """Emits the path to node `deepest` int32[B], then the token `last` int32[B]."""
    num_accepted = jnp.take_along_axis(node_depths(ancestors), deepest[:, None], axis=1)
    path = path_to(ancestors, deepest)
    # path = [root, d1, .., da, ..] -> tokens = [d1, .., da, last, ..]
    drafted = jnp.take_along_axis(draft.tokens, jnp.roll(path, -1, axis=1), axis=1)
    slots = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)
    tokens = jnp.where(slots == num_accepted, last[:, None], drafted)
    return Acceptance(tokens, num_accepted[:, 0] + 1, path)


def residual_law(p: jax.Array, q: jax.Array) -> jax.Array:
    """norm(max(p - q, 0)), [B, V]: the law of the token where one drawn from q was rejected for p."""
    rest = jnp.maximum(p - q, 0.0)
    total = jnp.sum(rest, axis=-1, keepdims=True)
    # p = q to the last bit leaves nothing, where exact arithmetic would never have rejected.
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1.0), p)


def accept_by_rejection(
    draft: Draft, logits: jax.Array, sampling: Sampling, next_positions: jax.Array
) -> Acceptance:
    """Multi-round rejection sampling down the tree (Leviathan et al. 2211.17192; SpecInfer 2305.09781).

    At a kept node with law p, its children are tried in order. Child c with law q is accepted with
    probability min(1, p(c) / q(c)); otherwise p becomes norm(max(p - q, 0)) for the next child. Where no
    child is accepted, the token is drawn from what p has become: the residual, or p itself behind a leaf.
    Siblings may be drawn independently or without replacement: q is the law that the child was really drawn
    from, given its earlier siblings. Greedy rows have p = 1 on the argmax.

    Args:
      next_positions: int32[B, T], where the token that follows node t would stand.
    """
    assert draft.probs is not None
    laws = target_law(logits, sampling)
    root = jnp.zeros_like(draft.tokens[:, 0])

    def pick(x: jax.Array, node: jax.Array) -> jax.Array:
        index = node.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.take_along_axis(x, index, axis=1)[:, 0]

    def try_node(t: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        current, p = carry
        is_child = draft.parents[:, t] == current
        position = pick(next_positions, current)[:, None]
        keys = position_keys(sampling, position, Purpose.ACCEPT, t)[:, 0]
        coin = jax.vmap(jax.random.uniform)(keys)
        q, token = draft.probs[:, t], draft.tokens[:, t][:, None]  # type: ignore[index]
        p_token, q_token = (jnp.take_along_axis(x, token, axis=1)[:, 0] for x in (p, q))
        accepted = is_child & (coin * q_token < p_token)
        p = jnp.where((is_child & ~accepted)[:, None], residual_law(p, q), p)
        p = jnp.where(accepted[:, None], laws[:, t], p)
        return jnp.where(accepted, t, current), p

    deepest, p = jax.lax.fori_loop(1, draft.tokens.shape[1], try_node, (root, laws[:, 0]))
    noise = gumbel_noise(sampling, pick(next_positions, deepest)[:, None], p.shape[-1], Purpose.TOKEN)[:, 0]
    last = likeliest(jnp.log(p) + noise)
    return _acceptance(draft, ancestor_mask(draft.parents), deepest, last)
