"""Commit: accepted tokens and their K/V become part of the sequence; ends and limits cut them.

What lies in a row's cache, K = 3, when one of three drafted tokens is accepted (e: the recovered token):

    position        0   1   2   3   4   5   6   7
    tokens          a   b   c   r                       lengths = 3, root r at position 3, not cached
    cache           a   b   c   .   .   .   .   .
    draft                       r   x   y   z           verify returns the K/V of r x y z
    accept                          x   e               path = [r, x], num_emitted = 2
    tokens          a   b   c   r   x   e
    cache           a   b   c   r   x   ?   ?   .       lengths = 5, root e at position 5
                                        └───┴── written with the rest of the path, behind lengths:
                                                does not exist, overwritten by the next step
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sv_jax.model.cache import KVCache, LayerKV
from sv_jax.sharding import Sharding
from sv_jax.sparsity.summaries import BlockSummaries, update_summaries
from sv_jax.speculation.types import (
    Acceptance,
    Draft,
    Logprobs,
    SpeculationState,
    StepReads,
    Trace,
)


def cut_at_ends(
    tokens: jax.Array, num_emitted: jax.Array, room: jax.Array, eos_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many of the emitted tokens stay, and whether the row ends with them.

    Args:
      tokens: int32[B, T]. num_emitted: int32[B], 0 for rows that emit nothing.
      room: int32[B], tokens that the row's limit still allows.
      eos_ids: int32[B, E]; the first of them among the emitted tokens stays and ends the row.

    Returns:
      (num_emitted int32[B], finished bool[B]).
    """
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    is_eos = jnp.any(tokens[:, :, None] == eos_ids[:, None, :], axis=-1)
    is_eos = is_eos & (slots < num_emitted[:, None])
    through_eos = jnp.min(jnp.where(is_eos, slots + 1, tokens.shape[1] + 1), axis=1)
    kept = jnp.minimum(jnp.minimum(num_emitted, room), through_eos)
    return kept, (kept == through_eos) | (kept >= room)


def append_tokens(buffer: jax.Array, new: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes new [B, T, ..] into buffer [B, N, ..] at starts[b]; needs starts + T <= N."""

    def row(old: jax.Array, update: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, update, (start, *[0] * (old.ndim - 1)))

    return jax.vmap(row)(buffer, new, starts)


def behind_tokens(lengths: jax.Array, tokens: jax.Array) -> jax.Array:
    """lengths int32[B], made to depend on emitted tokens int32[B, T] (which are never negative).

    A cache write that starts there comes after the logits, hence after every read of the old cache, and
    happens in place. Without the dependency XLA copies every cache in every step. (The gather by path gives
    none where T = 1: its index is constant. An optimization_barrier is gone before copies are decided on.)
    """
    return jnp.where(tokens[:, 0] < 0, 0, lengths)


def gather_path(new_kv: tuple[LayerKV, ...], path: jax.Array) -> tuple[LayerKV, ...]:
    """K/V [B, T, K, D] of a tree's nodes -> of the accepted path, in order of position. Chains too."""
    index = path[:, :, None, None]
    return tuple(
        (jnp.take_along_axis(k, index, axis=1), jnp.take_along_axis(v, index, axis=1)) for k, v in new_kv
    )


def _trace(
    state: SpeculationState,
    draft: Draft,
    verified: Draft,
    acceptance: Acceptance,
    reads: StepReads,
) -> Trace:
    """The trace of a step's tokens, [B, T]."""
    shape = acceptance.tokens.shape
    slots = jnp.arange(shape[1], dtype=jnp.int32)
    is_draft = slots < (acceptance.num_emitted - 1)[:, None]
    # In a step that verified nothing: whether some proposal below the root was the token that came.
    guess = (draft.parents == 0) & (draft.tokens == acceptance.tokens[:, :1])
    seen = jnp.any(guess, axis=1, keepdims=True) & (slots == 0) & (verified.num_drafted == 0)[:, None]
    kv_blocks = jnp.zeros_like(state.lengths) if reads.kv_blocks is None else reads.kv_blocks

    def everywhere(count: jax.Array) -> jax.Array:
        return jnp.broadcast_to(count, shape)

    return Trace(
        step=jnp.broadcast_to(state.steps + 1, shape),
        drafted=jnp.broadcast_to(verified.num_drafted[:, None], shape),
        proposed=jnp.broadcast_to(draft.num_drafted[:, None], shape),
        foreseen=is_draft | seen,
        kv_blocks=jnp.broadcast_to(kv_blocks[:, None], shape),
        experts=jax.tree.map(everywhere, reads.experts),
        channels=jax.tree.map(everywhere, reads.channels),
    )


def refresh_summaries(
    state: SpeculationState, cache: KVCache, lengths: jax.Array, num_tokens: int, sharding: Sharding
) -> BlockSummaries | None:
    """Block summaries after `num_tokens` slots were written, of which those before `lengths` stay."""
    if state.summaries is None:
        return None
    return update_summaries(state.summaries, cache, state.lengths, lengths, num_tokens, sharding)


def record(old: Any, new: Any, starts: jax.Array) -> Any:
    """Writes what belongs to emitted tokens ([B, T, ..] leaves) at their positions ([B, N, ..] leaves)."""
    return jax.tree.map(lambda buffer, values: append_tokens(buffer, values, starts), old, new)


def commit(
    state: SpeculationState,
    draft: Draft,
    verified: Draft,
    new_kv: tuple[LayerKV, ...],
    acceptance: Acceptance,
    sharding: Sharding,
    reads: StepReads | None = None,
    logprobs: Logprobs | None = None,
) -> SpeculationState:
    """lengths += what was emitted; a finished row emits 0, an EOS token or the limit truncates.

    The caller guarantees capacity: lengths + T <= cache.capacity for every row, finished ones too.

    Args:
      draft: as proposed. verified: what was left of it to verify.
      reads: what verification read; None: it was dense.
      logprobs: of the emitted tokens, [B, T, ..]; None where the state keeps none.
    """
    with jax.named_scope("commit"):
        emitted = jnp.where(state.finished, 0, acceptance.num_emitted)
        room = state.limits - (state.lengths + 1)
        kept, ended = cut_at_ends(acceptance.tokens, emitted, room, state.eos_ids)
        kept = jnp.where(state.finished, 0, kept)
        starts = behind_tokens(state.lengths, acceptance.tokens)
        cache = state.cache.write(gather_path(new_kv, acceptance.path), starts, sharding)
        lengths = state.lengths + kept
        return dataclasses.replace(
            state,
            cache=cache,
            summaries=refresh_summaries(state, cache, lengths, acceptance.tokens.shape[1], sharding),
            tokens=append_tokens(state.tokens, acceptance.tokens, state.lengths + 1),
            trace=record(
                state.trace,
                _trace(state, draft, verified, acceptance, reads or StepReads()),
                state.lengths + 1,
            ),
            logprobs=record(state.logprobs, logprobs, state.lengths + 1),
            lengths=lengths,
            finished=state.finished | ended,
            steps=state.steps + 1,
        )
