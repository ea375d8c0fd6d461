"""Making, placing and growing the state that the loop carries."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sv_jax.model.cache import CACHE_AXES, empty_cache
from sv_jax.model.ffn import ChannelReads
from sv_jax.model.moe import ExpertReads
from sv_jax.model.transformer import Transformer
from sv_jax.sparsity.plan import SparsityPlan
from sv_jax.sparsity.summaries import SUMMARY_AXES, planned_summaries
from sv_jax.speculation.request import Request
from sv_jax.speculation.types import Logprobs, SpeculationState, Trace

# Logical axes by field; what is not listed has one row per sequence and nothing to cut behind it.
_WHOLE = ("steps", "vocab_size")


def state_axes(state: SpeculationState) -> Any:
    """The state's tree with each array's logical axes in its place."""

    def axes(path: tuple[Any, ...], leaf: jax.Array) -> tuple[str | None, ...]:
        field = path[0].name
        if field == "cache":
            return CACHE_AXES
        if field == "summaries":
            return SUMMARY_AXES
        return () if field in _WHOLE else ("batch", *[None] * (leaf.ndim - 1))

    return jax.tree_util.tree_map_with_path(axes, state)


def constrain_state(target: Transformer, state: SpeculationState) -> SpeculationState:
    """Pins every array of a state inside jit, so that what a slice returns fits what the next one takes."""
    return jax.tree.map(lambda x, axes: target.sharding.constrain(x, *axes), state, state_axes(state))


@partial(jax.jit, static_argnames=("target", "capacity"))
def grow_state(target: Transformer, state: SpeculationState, *, capacity: int) -> SpeculationState:
    """The same state in a larger bucket."""
    extra = capacity - state.cache.capacity

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2))

    by_position = {name: jax.tree.map(pad, getattr(state, name)) for name in ("tokens", "trace", "logprobs")}
    summaries = None if state.summaries is None else state.summaries.grow(capacity)
    grown = dataclasses.replace(state, cache=state.cache.grow(capacity), summaries=summaries, **by_position)
    return constrain_state(target, grown)


@partial(jax.jit, static_argnames=("target", "capacity", "num_logprobs"))
def start_state(
    target: Transformer,
    request: Request,
    *,
    capacity: int,
    num_logprobs: int = 0,
    sparsity: SparsityPlan | None = None,
) -> SpeculationState:
    """A state in which nothing is committed yet.

    Args:
      capacity: cache slots per row. Bytes: 2 * layers * B * KV heads * capacity * head_dim * itemsize.
      num_logprobs: alternatives whose log-probabilities are kept for each token; 0 keeps none at all.
      sparsity: the plan of slices that will verify sparsely, which need summaries of the cache.
    """
    batch = request.prompt_lengths.shape[0]

    def by_position(dtype: Any, *more: int) -> jax.Array:
        return jnp.zeros((batch, capacity + 1, *more), dtype)

    step, drafted, proposed, kv_blocks = (by_position(jnp.int32) for _ in range(4))
    summaries = experts = channels = None
    if sparsity is not None and sparsity.sparse_ffn and target.config.moe is not None:
        experts = ExpertReads(*(by_position(jnp.int32) for _ in ExpertReads._fields))
    if sparsity is not None and sparsity.channels is not None:
        channels = ChannelReads(*(by_position(jnp.float32) for _ in ChannelReads._fields))
    if sparsity is not None and sparsity.attention is not None:
        summaries = planned_summaries(sparsity.attention, target.config, batch, capacity)
    logprobs = None
    if num_logprobs:
        alternatives = [by_position(dtype, num_logprobs) for dtype in (jnp.float32, jnp.int32)]
        logprobs = Logprobs(by_position(jnp.float32), *alternatives)
    state = SpeculationState(
        cache=empty_cache(target.config, batch, capacity, target.dtype, target.sharding),
        summaries=summaries,
        tokens=by_position(jnp.int32),
        lengths=jnp.zeros((batch,), jnp.int32),
        finished=request.prompt_lengths == 0,
        trace=Trace(step, drafted, proposed, by_position(bool), kv_blocks, experts, channels),
        logprobs=logprobs,
        steps=jnp.zeros((), jnp.int32),
        **{field.name: getattr(request, field.name) for field in dataclasses.fields(request)},
    )
    return constrain_state(target, state)
