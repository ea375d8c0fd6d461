"""What flows between the phases of a step. Every array has static shape and one row per sequence.

A step's T tokens form a tree: node 0 is the root (the last emitted token, not yet in the cache), a drafted
token hangs below the token it follows, and a chain is the tree with one branch.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from sv_jax.model.cache import KVCache, LayerKV


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """The tokens that a step verifies."""

    tokens: jax.Array  # int32[B, T]; tokens[:, 0] is the root
    parents: jax.Array  # int32[B, T]; index of the node that t follows, < t; -1 for the root and empty slots
    # float32[B, T, V], the law each token was drawn from; None: the drafter is deterministic.
    probs: jax.Array | None = None

    @property
    def num_drafted(self) -> jax.Array:
        """int32[B]: drafted tokens, root and empty slots not counted."""
        return jnp.sum(self.parents >= 0, axis=1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verification:
    """One target forward pass over a draft."""

    logits: jax.Array  # float32[B, T, V]: the law of the token that follows node t
    new_kv: tuple[LayerKV, ...]  # per layer (keys, values), [B, T, K, D]; not in the cache yet


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What a step emits, before ends and limits cut it."""

    tokens: jax.Array  # int32[B, T]: accepted drafts, then the bonus or recovered token
    num_emitted: jax.Array  # int32[B]: 1 .. T, how many of `tokens` count
    path: (
        jax.Array
    )  # int32[B, T]: nodes in order of depth, root first; entries past num_emitted are arbitrary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counters per row, from the first decode step on (the prefill's token is not counted)."""

    histogram: jax.Array  # int32[B, K + 2]: steps in which the live row emitted i tokens
    drafted: jax.Array  # int32[B]: drafted tokens
    accepted: jax.Array  # int32[B]: drafted tokens that were emitted
    steps_with_draft: jax.Array  # int32[B]
    steps: jax.Array  # int32[]: target passes
    plain_steps: jax.Array  # int32[]: those that no row had a draft for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculationState:
    """Everything that a slice of steps carries; donated to it and returned.

    Invariants: K/V of positions 0 .. lengths-1 are in the cache; tokens[b, i] is the token at position i for
    i <= lengths[b] once the row has started; tokens[b, lengths[b]] is then the root. What lies behind does
    not exist.
    """

    cache: KVCache
    tokens: jax.Array  # int32[B, capacity + 1]: prompt, output, then leftovers
    lengths: jax.Array  # int32[B]: committed tokens
    prompt_lengths: jax.Array  # int32[B]; 0 marks a row that only pads the batch
    limits: jax.Array  # int32[B]: tokens of prompt and output together at which the row ends
    eos_ids: jax.Array  # int32[B, E]: tokens that end the row; -1 fills up
    finished: jax.Array  # bool[B]
    statistics: Statistics


class Drafter(Protocol):
    """Proposes continuations. Frozen and hashable: a static argument of the jitted loop."""

    @property
    def num_speculative_tokens(self) -> int:
        """Most tokens below the root: a draft has T = this + 1 nodes."""

    def propose(self, state: SpeculationState) -> Draft:
        """The root and what may follow it, for every row."""
