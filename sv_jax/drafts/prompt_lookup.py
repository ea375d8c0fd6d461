"""Prompt lookup: what followed the last n tokens when they stood here before (prompt and output)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sv_jax.config import UserError
from sv_jax.speculation.types import Draft, SpeculationState


def last_match(tokens: jax.Array, history: jax.Array, n: int) -> jax.Array:
    """Where the last n tokens of each row's history last stood before.

    Args:
      tokens: int32[B, N]. history: int32[B], how many of a row's tokens exist.

    Returns:
      int32[B], the start of the most recent earlier occurrence that has a token behind it, or -1.
    """
    size = tokens.shape[1]
    suffix_start = history - n
    suffix_index = jnp.maximum(suffix_start[:, None] + jnp.arange(n, dtype=jnp.int32), 0)
    suffix = jnp.take_along_axis(tokens, suffix_index, axis=1)
    starts = jnp.arange(size, dtype=jnp.int32)
    matches = starts < suffix_start[:, None]
    for i in range(n):
        shifted = jnp.pad(tokens[:, i:], [(0, 0), (0, i)], constant_values=-1)
        matches = matches & (shifted == suffix[:, i : i + 1])
    return jnp.max(jnp.where(matches, starts, -1), axis=1)


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Longest n first, then the most recent match; its continuation is the draft, a chain of K tokens.

    A match so recent that its continuation runs into the end of the history goes on with itself: the text
    is repeating with that period. Deterministic: the draft's law is 1 on its token.
    """

    num_speculative_tokens: int
    max_ngram: int = 3

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1 or self.max_ngram < 1:
            raise UserError(
                f"num_speculative_tokens={self.num_speculative_tokens}, max_ngram={self.max_ngram}: "
                "prompt lookup needs at least 1 of each"
            )

    def propose(self, state: SpeculationState) -> Draft:
        """Rows without a match get empty slots below the root."""
        history = state.lengths + 1
        continuation = jnp.full_like(history, -1)
        for n in range(self.max_ngram, 0, -1):
            start = last_match(state.tokens, history, n)
            continuation = jnp.where((continuation < 0) & (start >= 0), start + n, continuation)
        found = continuation >= 0
        period = jnp.maximum(history - continuation, 1)[:, None]
        steps = jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)
        index = jnp.where(found[:, None], continuation[:, None] + steps % period, 0)
        drafted = jnp.take_along_axis(state.tokens, index, axis=1)
        root = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)
        parents = jnp.where(found[:, None], steps, -1)
        return Draft(
            tokens=jnp.concatenate([root, drafted], axis=1),
            parents=jnp.pad(parents, [(0, 0), (1, 0)], constant_values=-1),
        )
