"""Drafters that know the answer: for tests of the loop, where acceptance must be under control."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.speculation.types import Draft, SpeculationState


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Proposes from known continuations (prompt and plain output of every row).

    right: how many of the drafted tokens are right, by the row's length modulo len(right); the others are
    off by one. branches: 1 is a chain; with more, `right` describes the branch number
    (length mod branches), and the other branches start with a wrong token.
    """

    texts: tuple[tuple[int, ...], ...]
    num_speculative_tokens: int
    right: tuple[int, ...]
    branches: int = 1
    vocab_size: int = 64

    def propose(self, state: SpeculationState) -> Draft:
        depth = self.num_speculative_tokens // self.branches
        width = max(map(len, self.texts)) + depth + 1
        table = np.zeros((len(self.texts), width), np.int32)
        for row, text in zip(table, self.texts):
            row[: len(text)] = text
        steps = jnp.arange(depth, dtype=jnp.int32)
        index = jnp.minimum(state.lengths[:, None] + 1 + steps, width - 1)
        truth = jnp.take_along_axis(jnp.asarray(table), index, axis=1)
        right = jnp.asarray(self.right, jnp.int32)[state.lengths % len(self.right)]
        good = state.lengths % self.branches

        def branch(i: int) -> jax.Array:
            count = jnp.where(good == i, right, 0)[:, None]
            return jnp.where(steps < count, truth, (truth + 1 + i) % self.vocab_size)

        # Breadth first: node 1 + d * branches + i is branch i at depth d.
        nodes = jnp.stack([branch(i) for i in range(self.branches)], axis=2)
        drafted = nodes.reshape(len(self.texts), depth * self.branches)
        root = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)
        parents = [-1] + [max(0, node - self.branches) for node in range(1, depth * self.branches + 1)]
        tokens = jnp.concatenate([root, drafted], axis=1)
        return Draft(tokens, jnp.broadcast_to(jnp.array(parents, jnp.int32), tokens.shape))
