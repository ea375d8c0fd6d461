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
from sv_jax.model.ffn import ChannelReads
from sv_jax.model.moe import ExpertReads
from sv_jax.sparsity.summaries import BlockSummaries


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
class StepReads:
    """What a step read, over layers. None: the part was dense."""

    kv_blocks: jax.Array | None = None  # int32[B]: KV blocks of a row, over KV heads too
    experts: ExpertReads | None = None  # int32[] each, of all rows together
    channels: ChannelReads | None = None  # float32[] each, of all rows, in layers that leave some out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verification:
    """One target forward pass over a draft."""

    logits: jax.Array  # float32[B, T, V]: the law of the token that follows node t
    new_kv: tuple[LayerKV, ...]  # per layer (keys, values), [B, T, K, D]; not in the cache yet
    reads: StepReads


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
class Trace:
    """Where each emitted token came from, at its position. Statistics are read from it, so that whatever
    cuts tokens (a stop string that the host finds) cuts the statistics with them."""

    step: jax.Array  # int32[B, N]: number of the step that emitted it, from 1; 0: prompt or prefill
    drafted: jax.Array  # int32[B, N]: drafted tokens that the step verified for the row
    proposed: jax.Array  # int32[B, N]: tokens that the drafter had proposed, verified or not
    # bool[B, N]: an accepted draft; in a step that verified nothing, a proposal that would have been right.
    foreseen: jax.Array
    # int32[B, N]: KV blocks that the step read for the row, over layers and KV heads; 0: it was dense.
    kv_blocks: jax.Array
    # The step's, [B, N] each: the same for all rows. None: that part is never sparse.
    experts: ExpertReads | None
    channels: ChannelReads | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of emitted tokens, at their positions: log_softmax of the model's own logits, before
    penalties, temperature and filters."""

    emitted: jax.Array  # float32[B, N]
    top: jax.Array  # float32[B, N, M], descending
    top_ids: jax.Array  # int32[B, N, M]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each row picks tokens. Neutral values switch a part off; changing a value recompiles nothing."""

    temperature: jax.Array  # float32[B]; 0: greedy
    top_k: jax.Array  # int32[B]; 0: off
    top_p: jax.Array  # float32[B]; 1: off
    min_p: jax.Array  # float32[B]; 0: off
    repetition_penalty: jax.Array  # float32[B]; 1: off
    presence_penalty: jax.Array  # float32[B]; 0: off
    frequency_penalty: jax.Array  # float32[B]; 0: off
    keys: jax.Array  # uint32[B, 2]: threefry key data of the row (sampling.row_keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculationState:
    """Everything that a slice of steps carries; donated to it and returned.

    Invariants: K/V of positions 0 .. lengths-1 are in the cache; tokens[b, i] is the token at position i for
    i <= lengths[b] once the row has started; tokens[b, lengths[b]] is then the root. What lies behind does
    not exist.
    """

    cache: KVCache
    summaries: BlockSummaries | None  # of the cache's blocks; None: verification is dense
    tokens: jax.Array  # int32[B, N], N = capacity + 1: prompt, output, then leftovers
    lengths: jax.Array  # int32[B]: committed tokens
    prompt_lengths: jax.Array  # int32[B]; 0 marks a row that only pads the batch
    min_lengths: jax.Array  # int32[B]: tokens of prompt and output together before which no EOS is emitted
    limits: jax.Array  # int32[B]: tokens of prompt and output together at which the row ends
    eos_ids: jax.Array  # int32[B, E]: tokens that end the row; -1 fills up
    vocab_size: jax.Array  # int32[]: ids that the tokenizer has; the model's padding behind is never emitted
    finished: jax.Array  # bool[B]
    sampling: Sampling
    trace: Trace
    logprobs: Logprobs | None  # None: nobody asked
    steps: jax.Array  # int32[]: decode steps so far


class Drafter(Protocol):
    """Proposes continuations. Frozen and hashable: a static argument of the jitted loop."""

    @property
    def num_speculative_tokens(self) -> int:
        """Most tokens below the root: a draft has T = this + 1 nodes."""

    def propose(self, state: SpeculationState) -> Draft:
        """The root and what may follow it, for every row."""
