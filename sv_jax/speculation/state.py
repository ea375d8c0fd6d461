"""Making, placing and growing the state that the loop carries."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.platform import cache_layout
from sv_jax.model.cache import KVCache, cache_axes, cache_shape
from sv_jax.model.transformer import Transformer
from sv_jax.speculation.types import SpeculationState, Statistics


def state_axes(state: SpeculationState) -> SpeculationState:
    """The state's tree with each array's logical axes in its place."""
    row, matrix = ("batch",), ("batch", None)
    layer = cache_axes(state.cache.layout)
    layers = tuple(layer for _ in state.cache.keys)
    return SpeculationState(
        cache=KVCache(layers, layers, state.cache.layout),  # type: ignore[arg-type]
        tokens=matrix,  # type: ignore[arg-type]
        lengths=row,  # type: ignore[arg-type]
        prompt_lengths=row,  # type: ignore[arg-type]
        limits=row,  # type: ignore[arg-type]
        eos_ids=matrix,  # type: ignore[arg-type]
        finished=row,  # type: ignore[arg-type]
        statistics=Statistics(matrix, row, row, row, (), ()),  # type: ignore[arg-type]
    )


def constrain_state(target: Transformer, state: SpeculationState) -> SpeculationState:
    """Pins every array of a state inside jit, so that what a slice returns fits what the next one takes."""
    return jax.tree.map(lambda x, axes: target.sharding.constrain(x, *axes), state, state_axes(state))


@partial(jax.jit, static_argnames=("target", "capacity"))
def grow_state(target: Transformer, state: SpeculationState, *, capacity: int) -> SpeculationState:
    """The same state in a larger bucket."""
    extra = capacity - state.cache.capacity
    grown = dataclasses.replace(
        state, cache=state.cache.grow(capacity), tokens=jnp.pad(state.tokens, [(0, 0), (0, extra)])
    )
    return constrain_state(target, grown)


@partial(jax.jit, static_argnames=("target", "capacity", "num_speculative_tokens"))
def start_state(
    target: Transformer,
    prompt_lengths: jax.Array,
    limits: jax.Array,
    eos_ids: jax.Array,
    *,
    capacity: int,
    num_speculative_tokens: int,
) -> SpeculationState:
    """A state in which nothing is committed yet.

    Args:
      prompt_lengths: int32[B]; 0 makes a row that only pads the batch.
      limits: int32[B], tokens of prompt and output together at which each row ends.
      eos_ids: int32[B, E], tokens that end a row; -1 fills up.
      capacity: cache slots per row. Bytes: 2 * layers * B * KV heads * capacity * head_dim * itemsize.
    """
    batch = prompt_lengths.shape[0]
    layout = cache_layout(target.sharding.platform)
    shape = cache_shape(target.config, batch, capacity, layout)

    def layers() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, target.dtype) for _ in range(target.config.num_layers))

    zeros = jnp.zeros((batch,), jnp.int32)
    zero = jnp.zeros((), jnp.int32)
    histogram = jnp.zeros((batch, num_speculative_tokens + 2), jnp.int32)
    state = SpeculationState(
        cache=KVCache(layers(), layers(), layout),
        tokens=jnp.zeros((batch, capacity + 1), jnp.int32),
        lengths=zeros,
        prompt_lengths=prompt_lengths,
        limits=limits,
        eos_ids=eos_ids,
        finished=prompt_lengths == 0,
        statistics=Statistics(histogram, zeros, zeros, zeros, zero, zero),
    )
    return constrain_state(target, state)
