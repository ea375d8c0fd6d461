"""Drafters that know the answer: for tests of the loop, where acceptance must be under control."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.model.transformer import Params, Transformer
from sv_jax.sparsity.plan import SparsityPlan
from sv_jax.speculation.loop import step
from sv_jax.speculation.types import Draft, SpeculationState


def scripted_draft(
    state: SpeculationState,
    table: jax.Array,
    right: jax.Array,
    num_tokens: int,
    branches: int,
    vocab_size: int,
) -> Draft:
    """See `Scripted`. table: int32[B, N], the continuations. right: int32[R]."""
    depth = num_tokens // branches
    steps = jnp.arange(depth, dtype=jnp.int32)
    index = jnp.minimum(state.lengths[:, None] + 1 + steps, table.shape[1] - 1)
    truth = jnp.take_along_axis(table, index, axis=1)
    right = right[state.lengths % len(right)]
    good = state.lengths % branches

    def branch(i: int) -> jax.Array:
        count = jnp.where(good == i, right, 0)[:, None]
        return jnp.where(steps < count, truth, (truth + 1 + i) % vocab_size)

    # Breadth first: node 1 + d * branches + i is branch i at depth d.
    nodes = jnp.stack([branch(i) for i in range(branches)], axis=2)
    drafted = nodes.reshape(len(table), depth * branches)
    root = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)
    parents = [-1] + [max(0, node - branches) for node in range(1, depth * branches + 1)]
    tokens = jnp.concatenate([root, drafted], axis=1)
    return Draft(tokens, jnp.broadcast_to(jnp.array(parents, jnp.int32), tokens.shape))


def as_table(texts: Sequence[Sequence[int]], width: int) -> np.ndarray:
    table = np.zeros((len(texts), width), np.int32)
    for row, text in zip(table, texts):
        row[: len(text)] = text
    return table


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
        width = max(map(len, self.texts)) + self.num_speculative_tokens + 1
        table, right = jnp.asarray(as_table(self.texts, width)), jnp.asarray(self.right, jnp.int32)
        sizes = self.num_speculative_tokens, self.branches, self.vocab_size
        return scripted_draft(state, table, right, *sizes)


@dataclasses.dataclass
class _Traced:
    """`Scripted` with arrays: lives inside of one trace."""

    table: jax.Array
    right: jax.Array
    num_speculative_tokens: int
    branches: int
    vocab_size: int

    def propose(self, state: SpeculationState) -> Draft:
        sizes = self.num_speculative_tokens, self.branches, self.vocab_size
        return scripted_draft(state, self.table, self.right, *sizes)


def scripted_steps(
    target: Transformer,
    num_tokens: int,
    branches: int,
    params: Params,
    state: SpeculationState,
    table: jax.Array,
    right: jax.Array,
    max_drafted: jax.Array,
    sparsity: SparsityPlan | None = None,
) -> SpeculationState:
    """Steps until every row has ended. The first three are static."""
    drafter = _Traced(table, right, num_tokens, branches, target.config.vocab_size)
    return jax.lax.while_loop(
        lambda state: ~jnp.all(state.finished),
        lambda state: step(target, params, drafter, state, max_drafted, sparsity),
        state,
    )


STATIC = (0, 1, 2)
COMPILED = jax.jit(scripted_steps, static_argnums=STATIC)


def run_script(
    target: Transformer,
    params: Params,
    state: SpeculationState,
    texts: Sequence[Sequence[int]],
    right: Sequence[int],
    *,
    num_tokens: int = 8,
    branches: int = 1,
    max_drafted: int = 99,
    sparsity: SparsityPlan | None = None,
    steps: Callable[..., SpeculationState] = COMPILED,
) -> SpeculationState:
    """Decodes with drafts like `Scripted`'s; one program for all texts and patterns. The state has room."""
    table = as_table(texts, state.tokens.shape[1])
    cycle = np.resize(np.array(right, np.int32), 120)  # one length, which every short pattern divides
    assert 120 % len(right) == 0 and max(right) <= num_tokens // branches
    return steps(target, num_tokens, branches, params, state, table, cycle, max_drafted, sparsity)
