"""What changes logits before anything is picked: penalties, minimum length, the vocabulary's padding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sv_jax.speculation.types import Sampling, SpeculationState

COUNTED_TOGETHER = 2048  # tokens of a row


class TokenCounts(NamedTuple):
    """How often each token stands somewhere, float32[.., V] both."""

    everywhere: jax.Array
    output: jax.Array  # the prompt left out


def some_penalty(sampling: Sampling) -> jax.Array:
    """bool[B]: rows whose tokens are to be counted."""
    return (
        (sampling.repetition_penalty != 1)
        | (sampling.presence_penalty != 0)
        | (sampling.frequency_penalty != 0)
    )


def count_committed(state: SpeculationState, vocab_size: int) -> TokenCounts:
    """How often each token stands among a row's committed ones, [B, V]; zeros where no row has a penalty.

    Once a step, for whatever its nodes are. The time follows the longest row, and so does not the size of a
    scatter: XLA for TPU sorts what a scatter adds, and takes ten seconds to compile a sort of 32,768 tokens.
    """
    batch, slots = state.tokens.shape
    size = min(COUNTED_TOGETHER, slots)

    def add(counts: jax.Array, tokens: jax.Array, there: jax.Array) -> jax.Array:
        return counts.at[tokens].add(there.astype(jnp.float32))

    def count_chunk(number: jax.Array, counts: TokenCounts) -> TokenCounts:
        first = jnp.minimum(number * size, slots - size)
        slot = first + jnp.arange(size, dtype=jnp.int32)
        committed = (slot >= number * size) & (slot < state.lengths[:, None])  # the last chunk may overlap
        output = committed & (slot >= state.prompt_lengths[:, None])
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, first, size, axis=1)
        return TokenCounts(
            *(jax.vmap(add)(c, tokens, there) for c, there in zip(counts, (committed, output)))
        )

    longest = jnp.where(jnp.any(some_penalty(state.sampling)), jnp.max(state.lengths), 0)
    nothing = jnp.zeros((batch, vocab_size), jnp.float32)
    return jax.lax.fori_loop(0, (longest + size - 1) // size, count_chunk, TokenCounts(nothing, nothing))


def count_tokens(
    committed: TokenCounts, state: SpeculationState, tokens: jax.Array, ancestors: jax.Array
) -> TokenCounts:
    """How often each token stands before the one that follows node t, [B, T, V].

    The row's committed tokens and, per node, its drafted ancestors: a token that is emitted in the middle
    of an accepted run has been counted for the nodes behind it as if it had been emitted alone.

    Args:
      committed: [B, V] (count_committed).
      tokens: int32[B, T], the step's nodes, root included (it is emitted, but not committed yet).
      ancestors: bool[B, T, T] (tree.ancestor_mask).
    """
    everywhere, output = (counts[:, None] for counts in committed)
    ids = jnp.arange(everywhere.shape[-1], dtype=jnp.int32)
    one_hot = (tokens[:, :, None] == ids).astype(jnp.float32)
    # A product of zeros and ones, exact in any precision, in place of a scatter of T paths of T tokens.
    path = jnp.einsum("btu,buv->btv", ancestors.astype(jnp.float32), one_hot)
    # Only prefill has a root that is no output: the prompt's last token.
    path_is_output = (state.lengths >= state.prompt_lengths)[:, None, None]
    return TokenCounts(everywhere + path, output + jnp.where(path_is_output, path, 0.0))


def penalise(logits: jax.Array, sampling: Sampling, counts: TokenCounts) -> jax.Array:
    """Repetition penalty (transformers: prompt and output; positive logits are divided, negative ones
    multiplied), then frequency and presence penalties (the output alone; subtracted)."""
    everywhere, output = counts
    repetition = sampling.repetition_penalty[:, None, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(everywhere > 0, repeated, logits)
    logits = logits - sampling.frequency_penalty[:, None, None] * output
    return logits - sampling.presence_penalty[:, None, None] * (output > 0)


def process_logits(
    logits: jax.Array,
    committed: TokenCounts,
    state: SpeculationState,
    tokens: jax.Array,
    ancestors: jax.Array,
    next_positions: jax.Array,
) -> jax.Array:
    """Logits that greedy and sampled rows pick from.

    Args:
      logits: float32[B, T, V] of the tokens that follow the nodes.
      committed, tokens, ancestors: see `count_tokens`.
      next_positions: int32[B, T], where the token that follows node t would stand.

    Returns:
      float32[B, T, V]: penalties, then -inf on EOS ids before a row's minimum length, and on ids that the
      tokenizer does not have.
    """
    sampling, vocab_size = state.sampling, logits.shape[-1]
    some = some_penalty(sampling)

    def with_penalties(logits: jax.Array) -> jax.Array:
        counts = count_tokens(committed, state, tokens, ancestors)
        return jnp.where(some[:, None, None], penalise(logits, sampling, counts), logits)

    logits = jax.lax.cond(jnp.any(some), with_penalties, lambda x: x, logits)
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    is_eos = jnp.any(state.eos_ids[:, :, None] == ids, axis=1)
    too_early = next_positions < state.min_lengths[:, None]
    never = (is_eos[:, None] & too_early[:, :, None]) | (ids >= state.vocab_size)
    return jnp.where(never, -jnp.inf, logits)
