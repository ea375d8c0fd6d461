"""Prefill: prompts go through the target in chunks of a few static sizes, densely."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from sv_jax.model.transformer import Params, Transformer, compute_logits, forward
from sv_jax.speculation.commit import (
    append_tokens,
    behind_tokens,
    cut_at_ends,
    record,
    refresh_summaries,
)
from sv_jax.speculation.logprobs import emitted_logprobs
from sv_jax.speculation.penalties import count_committed, process_logits
from sv_jax.speculation.sampling import draw_tokens
from sv_jax.speculation.state import constrain_state
from sv_jax.speculation.types import Logprobs, SpeculationState


def _draw_first(state: SpeculationState, logits: jax.Array) -> jax.Array:
    """int32[B, 1]: what follows the token at position lengths[b], which is the prompt's last one."""
    last_token = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)
    following = state.lengths[:, None] + 1
    alone = jnp.ones((*last_token.shape, 1), bool)
    committed = count_committed(state, logits.shape[-1])
    processed = process_logits(logits, committed, state, last_token, alone, following)
    return draw_tokens(processed, state.sampling, following)


def _first_logprobs(
    target: Transformer,
    logprobs: Logprobs,
    logits: jax.Array,
    first: jax.Array,
    lengths: jax.Array,
    completed: jax.Array,
) -> Logprobs:
    """`logprobs` with those of first tokens int32[B, 1]; rows that complete no prompt keep theirs."""
    path = jnp.zeros_like(first)
    new = emitted_logprobs(logits, first, path, logprobs.top.shape[-1], target.sharding)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        held = jax.vmap(lambda row, i: row[i][None])(old, lengths)
        return jnp.where(completed.reshape(-1, *[1] * (new.ndim - 1)), new, held)

    return record(logprobs, jax.tree.map(choose, new, logprobs), lengths)


@partial(jax.jit, static_argnames=("target",), donate_argnames=("state",))
def prefill_chunk(
    target: Transformer, params: Params, state: SpeculationState, tokens: jax.Array
) -> SpeculationState:
    """Commits further prompt tokens of every row; a row's last one emits its first token.

    Args:
      tokens: int32[B, C], each row's prompt from lengths[b] on; beyond its prompt anything.

    Rows whose prompt is already done stay as they are (what is written behind their length does not
    exist). The caller guarantees lengths + C <= cache.capacity for every row.
    """
    with jax.named_scope("prefill"):
        batch, chunk_size = tokens.shape
        slots = jnp.arange(chunk_size, dtype=jnp.int32)
        positions = state.lengths[:, None] + slots
        causal = jnp.broadcast_to(slots[:, None] >= slots, (batch, chunk_size, chunk_size))
        remaining = state.prompt_lengths - state.lengths
        fed = jnp.minimum(remaining, chunk_size)
        hidden, new_kv, _, _ = forward(
            target,
            params,
            tokens,
            positions,
            state.cache,
            state.lengths,
            causal,
            live=slots < fed[:, None],
        )
        completed = (remaining > 0) & (fed == remaining)

        last = jnp.maximum(fed - 1, 0)[:, None, None]
        last_hidden = jnp.take_along_axis(hidden, last, axis=1)
        logits = compute_logits(target, params, last_hidden)  # [B, 1, V]

        lengths = state.lengths + fed
        # A row whose prompt is done keeps its root, which sits where the chunk would start.
        held = jax.vmap(lambda row, start: jax.lax.dynamic_slice(row, (start,), (chunk_size,)))(
            state.tokens, state.lengths
        )
        history = append_tokens(
            state.tokens, jnp.where((remaining > 0)[:, None], tokens, held), state.lengths
        )
        first = _draw_first(dataclasses.replace(state, tokens=history, lengths=lengths - 1), logits)
        held = jnp.take_along_axis(history, lengths[:, None], axis=1)
        history = append_tokens(history, jnp.where(completed[:, None], first, held), lengths)
        logprobs = state.logprobs
        if logprobs is not None:
            logprobs = _first_logprobs(target, logprobs, logits, first, lengths, completed)
        _, ended = cut_at_ends(
            first, completed.astype(jnp.int32), state.limits - state.prompt_lengths, state.eos_ids
        )
        cache = state.cache.write(new_kv, behind_tokens(state.lengths, first), target.sharding)
        return constrain_state(
            target,
            dataclasses.replace(
                state,
                cache=cache,
                summaries=refresh_summaries(state, cache, lengths, chunk_size, target.sharding),
                tokens=history,
                logprobs=logprobs,
                lengths=lengths,
                finished=state.finished | (completed & ended),
            ),
        )
