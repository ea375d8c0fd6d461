"""What changes logits before anything is picked: penalties, minimum length, the vocabulary's padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sv_jax.speculation.types import Sampling, SpeculationState


def _add_at(counts: jax.Array, tokens: jax.Array, amounts: jax.Array) -> jax.Array:
    """counts [.., V] with amounts [.., N] added at tokens [.., N]; one scatter per row, none across rows."""
    if counts.ndim > 1:
        return jax.vmap(_add_at)(counts, tokens, amounts)
    return counts.at[tokens].add(amounts)


def count_tokens(
    state: SpeculationState, tokens: jax.Array, ancestors: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """How often each token stands before the one that follows node t: (everywhere, in the output alone).

    Counted from the row's tokens and, per node, its drafted ancestors: a token that is emitted in the middle
    of an accepted run has been counted for the nodes behind it as if it had been emitted alone.

    Args:
      tokens: int32[B, T], the step's nodes, root included (it is emitted, but not committed yet).
      ancestors: bool[B, T, T] (tree.ancestor_mask).

    Returns:
      Two float32[B, T, V].
    """
    batch, num_nodes = tokens.shape
    slots = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
    committed = (slots < state.lengths[:, None]).astype(jnp.float32)
    is_output = (slots >= state.prompt_lengths[:, None]).astype(jnp.float32)
    empty = jnp.zeros((batch, vocab_size), jnp.float32)
    everywhere = _add_at(empty, state.tokens, committed)
    output = _add_at(empty, state.tokens, committed * is_output)

    below = jnp.broadcast_to(tokens[:, None, :], ancestors.shape)
    # Only prefill has a root that is no output: the prompt's last token.
    node_is_output = ancestors & (state.lengths >= state.prompt_lengths)[:, None, None]

    def per_node(counts: jax.Array, present: jax.Array) -> jax.Array:
        wide = jnp.broadcast_to(counts[:, None], (batch, num_nodes, vocab_size))
        return _add_at(wide, below, present.astype(jnp.float32))

    return per_node(everywhere, ancestors), per_node(output, node_is_output)


def penalise(logits: jax.Array, sampling: Sampling, everywhere: jax.Array, output: jax.Array) -> jax.Array:
    """Repetition penalty (transformers: prompt and output; positive logits are divided, negative ones
    multiplied), then frequency and presence penalties (the output alone; subtracted)."""
    repetition = sampling.repetition_penalty[:, None, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(everywhere > 0, repeated, logits)
    logits = logits - sampling.frequency_penalty[:, None, None] * output
    return logits - sampling.presence_penalty[:, None, None] * (output > 0)


def process_logits(
    logits: jax.Array,
    state: SpeculationState,
    tokens: jax.Array,
    ancestors: jax.Array,
    next_positions: jax.Array,
) -> jax.Array:
    """Logits that greedy and sampled rows pick from.

    Args:
      logits: float32[B, T, V] of the tokens that follow the nodes.
      tokens, ancestors: see `count_tokens`.
      next_positions: int32[B, T], where the token that follows node t would stand.

    Returns:
      float32[B, T, V]: penalties, then -inf on EOS ids before a row's minimum length, and on ids that the
      tokenizer does not have.
    """
    sampling, vocab_size = state.sampling, logits.shape[-1]
    some = (
        (sampling.repetition_penalty != 1)
        | (sampling.presence_penalty != 0)
        | (sampling.frequency_penalty != 0)
    )

    def with_penalties(logits: jax.Array) -> jax.Array:
        counts = count_tokens(state, tokens, ancestors, vocab_size)
        return jnp.where(some[:, None, None], penalise(logits, sampling, *counts), logits)

    logits = jax.lax.cond(jnp.any(some), with_penalties, lambda x: x, logits)
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    is_eos = jnp.any(state.eos_ids[:, :, None] == ids, axis=1)
    too_early = next_positions < state.min_lengths[:, None]
    never = (is_eos[:, None] & too_early[:, :, None]) | (ids >= state.vocab_size)
    return jnp.where(never, -jnp.inf, logits)
