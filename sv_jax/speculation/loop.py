"""The loop: propose, verify, accept, commit, in jitted slices of steps."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.platform import plain_step_tokens
from sv_jax.model.cache import LayerKV
from sv_jax.model.choices import DENSE
from sv_jax.model.transformer import Params, Transformer
from sv_jax.sparsity.plan import SparsityPlan
from sv_jax.sparsity.step import make_choices
from sv_jax.speculation.accept import accept
from sv_jax.speculation.commit import commit
from sv_jax.speculation.logprobs import emitted_logprobs
from sv_jax.speculation.penalties import TokenCounts, count_committed, process_logits
from sv_jax.speculation.state import constrain_state
from sv_jax.speculation.tree import ancestor_mask, existing_nodes, node_depths
from sv_jax.speculation.types import Acceptance, Draft, Drafter, Logprobs, SpeculationState, StepReads
from sv_jax.speculation.verify import verify


def prune(draft: Draft, max_depth: jax.Array) -> Draft:
    """Empties the slots of nodes deeper than max_depth int32[B]: they could not be emitted."""
    too_deep = node_depths(ancestor_mask(draft.parents)) > max_depth[:, None]
    return dataclasses.replace(draft, parents=jnp.where(too_deep, -1, draft.parents))


def step_width(target: Transformer, num_speculative_tokens: int, batch: int) -> int:
    """Nodes T that a step with K drafted tokens computes per row, and slots that it writes."""
    return max(num_speculative_tokens + 1, _plain_width(target, batch))


def _plain_width(target: Transformer, batch: int) -> int:
    return plain_step_tokens(target.sharding.platform, target.dtype, batch // target.sharding.data_size)


def _narrow(draft: Draft, width: int) -> Draft:
    return jax.tree.map(lambda x: x[:, :width], draft)


def _widen_draft(draft: Draft, width: int) -> Draft:
    """The same draft with empty slots behind it."""
    probs = None if draft.probs is None else _widen(draft.probs, width)
    return Draft(_widen(draft.tokens, width), _widen(draft.parents, width, fill=-1), probs)


def _widen(x: jax.Array, width: int, fill: int = 0) -> jax.Array:
    padding = [(0, 0), (0, width - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding, constant_values=fill)


def step(
    target: Transformer,
    params: Params,
    drafter: Drafter,
    state: SpeculationState,
    max_drafted: int | jax.Array | None = None,
    sparsity: SparsityPlan | None = None,
) -> SpeculationState:
    """One step of every row. Where no row has a draft it costs what a plain decode step does.

    The caller guarantees lengths + step_width(..) <= cache.capacity for every row.

    Args:
      max_drafted: deepest nodes that are verified, None for all that the drafter proposes; 0 makes a plain
        step. May be traced.
      sparsity: what verification leaves out (lossy); None: nothing. The state was started with the same plan.
    """
    with jax.named_scope("propose"):
        # A row with room for m tokens can use m - 1 drafted ones; a finished row none.
        useful = jnp.where(state.finished, 0, state.limits - state.lengths - 2)
        proposed = prune(drafter.propose(state), useful)
        draft = proposed if max_drafted is None else prune(proposed, jnp.minimum(useful, max_drafted))
    batch, num_nodes = draft.tokens.shape
    plain_width, width = _plain_width(target, batch), step_width(target, num_nodes - 1, batch)
    proposed, draft = _widen_draft(proposed, width), _widen_draft(draft, width)

    counts = count_committed(state, target.config.vocab_size)
    committed = TokenCounts(*(target.sharding.constrain(x, "batch", "vocab") for x in counts))

    def run(nodes: int) -> StepResults:
        results = verify_and_accept(target, params, state, _narrow(draft, nodes), committed, sparsity)
        return jax.tree.map(lambda x: x if x.ndim < 2 else _widen(x, width), results)

    if num_nodes > 1 and width > plain_width:
        # The branches only read the cache; the write comes behind them, once.
        results = jax.lax.cond(jnp.any(draft.num_drafted > 0), lambda: run(width), lambda: run(plain_width))
    else:
        results = run(width)
    acceptance, new_kv, reads, logprobs = results
    return commit(state, proposed, draft, new_kv, acceptance, target.sharding, reads, logprobs)


StepResults = tuple[Acceptance, tuple[LayerKV, ...], StepReads, Logprobs | None]


def verify_and_accept(
    target: Transformer,
    params: Params,
    state: SpeculationState,
    draft: Draft,
    committed: TokenCounts,
    sparsity: SparsityPlan | None = None,
) -> StepResults:
    """What a step emits, the K/V of its nodes, what it read, and log-probabilities where the state keeps
    them. committed: [B, V] (penalties.count_committed)."""
    choices = DENSE
    if sparsity is not None:
        nodes = existing_nodes(draft.parents)
        rows = state.lengths, nodes, ~state.finished
        choices = make_choices(sparsity, state.summaries, *rows, sharding=target.sharding)
    verification = verify(target, params, state.cache, state.lengths, draft, choices, state.finished)
    ancestors = ancestor_mask(draft.parents)
    following = state.lengths[:, None] + node_depths(ancestors) + 1
    logits = process_logits(verification.logits, committed, state, draft.tokens, ancestors, following)
    acceptance = accept(draft, logits, state.sampling, state.lengths)
    logprobs = None
    if state.logprobs is not None:
        count = state.logprobs.top.shape[-1]
        emitted = acceptance.tokens, acceptance.path
        logprobs = emitted_logprobs(verification.logits, *emitted, count, target.sharding)
    return acceptance, verification.new_kv, verification.reads, logprobs


def has_room(state: SpeculationState, width: int) -> jax.Array:
    """bool[]: every row, finished ones too, can take `width` more slots."""
    return jnp.all(state.lengths + width <= state.cache.capacity)


@partial(jax.jit, static_argnames=("target", "drafter"), donate_argnames=("state",))
def decode_slice(
    target: Transformer,
    params: Params,
    drafter: Drafter,
    state: SpeculationState,
    max_steps: jax.Array,
    max_drafted: jax.Array | None = None,
    sparsity: SparsityPlan | None = None,
) -> SpeculationState:
    """Up to `max_steps` steps on the device; ends earlier when all rows have, or when the bucket is full.

    Args:
      target, drafter: static; one program per pair, batch and bucket.
      state: donated. Prompts are prefilled.
      max_steps: int32[], traced: changing it does not recompile.
      max_drafted: int32[], traced; see `step`.
      sparsity: see `step`. Its budgets are traced, too.

    Returns:
      The state after the slice. If rows are unfinished and `max_steps` was not reached, the bucket is full:
      `grow_state`, then go on.
    """
    width = step_width(target, drafter.num_speculative_tokens, state.lengths.shape[0])

    def proceed(carry: tuple[jax.Array, SpeculationState]) -> jax.Array:
        done_steps, state = carry
        return (done_steps < max_steps) & ~jnp.all(state.finished) & has_room(state, width)

    def body(carry: tuple[jax.Array, SpeculationState]) -> tuple[jax.Array, SpeculationState]:
        done_steps, state = carry
        return done_steps + 1, constrain_state(
            target, step(target, params, drafter, state, max_drafted, sparsity)
        )

    _, state = jax.lax.while_loop(proceed, body, (jnp.zeros((), jnp.int32), state))
    return constrain_state(target, state)
