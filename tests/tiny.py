"""Tiny real models and a host loop around the jitted step, shared by the tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from sv_jax.config import DEFAULT_CUTS, Cuts, ModelConfig
from sv_jax.engine.trace import RowTrace, StepCounts, count_steps
from sv_jax.model.transformer import Params, Transformer, random_params
from sv_jax.sharding import make_sharding
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig
from sv_jax.sparsity.plan import SparsityPlan, make_plan
from sv_jax.speculation.loop import decode_slice
from sv_jax.speculation.prefill import prefill_chunk
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import grow_state, start_state
from sv_jax.speculation.types import Drafter, SpeculationState

TINY = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


def make_target(
    config: ModelConfig = TINY,
    mesh: tuple[int, int] = (1, 1),
    dtype: str = "float32",
    implementation: str | None = None,
    cuts: Cuts = DEFAULT_CUTS,
) -> Transformer:
    return Transformer(config, dtype, make_sharding(config, mesh, cuts), implementation)


@functools.cache
def make_model(
    config: ModelConfig = TINY,
    mesh: tuple[int, int] = (1, 1),
    dtype: str = "float32",
    seed: int = 0,
    implementation: str | None = None,
    cuts: Cuts = DEFAULT_CUTS,
) -> tuple[Transformer, Params]:
    """A model with random weights, the same on every mesh."""
    target = make_target(config, mesh, dtype, implementation, cuts)
    return target, random_params(target, seed)


def attention_plan(config: ModelConfig = TINY, *, block_size: int = 16, **attention: Any) -> SparsityPlan:
    """The plan of sparse attention for a model, in small blocks; further settings as a user gives them."""
    return make_plan(SparsityConfig(AttentionSparsity(block_size=block_size, **attention)), config)


def random_prompts(lengths: Sequence[int], *, seed: int = 0, vocab_size: int = 64) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


def prefilled(
    target: Transformer,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Sequence[int],
    capacity: int = 128,
    chunk: int = 16,
    num_logprobs: int = 0,
    sparsity: SparsityPlan | None = None,
    **request: Any,
) -> SpeculationState:
    """A state in which every prompt is committed and its first token emitted. [] pads the batch.

    request: further arguments of `make_request`.
    """
    lengths = np.array([len(p) for p in prompts], np.int32)
    arrays = make_request(lengths, limits, **request)
    state = start_state(target, arrays, capacity=capacity, num_logprobs=num_logprobs, sparsity=sparsity)
    padded = np.zeros((len(prompts), -(-max(lengths) // chunk) * chunk), np.int32)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt
    for start in range(0, padded.shape[1], chunk):
        # A row stands at min(start, its length): its next tokens lie at `start`, or it has none left.
        state = prefill_chunk(target, params, state, padded[:, start : start + chunk])
    return state


def run_to_end(
    target: Transformer,
    params: Params,
    drafter: Drafter,
    state: SpeculationState,
    *,
    max_steps: int = 1000,
    max_capacity: int = 1024,
    sparsity: SparsityPlan | None = None,
) -> SpeculationState:
    """Slices of `max_steps` until every row has finished; the cache doubles when a slice stops for it."""
    while True:
        before = int(state.steps)
        state = decode_slice(target, params, drafter, state, jnp.int32(max_steps), sparsity=sparsity)
        if bool(state.finished.all()):
            return state
        if int(state.steps) == before:
            capacity = state.cache.capacity * 2
            assert capacity <= max_capacity, "no progress"
            state = grow_state(target, state, capacity=capacity)


def sequences(state: SpeculationState) -> list[list[int]]:
    """Prompt and output of every row; [] for rows that pad the batch."""
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    pads = np.asarray(state.prompt_lengths) == 0
    return [[] if pad else row[: n + 1].tolist() for row, n, pad in zip(tokens, lengths, pads)]


def row_counts(state: SpeculationState, most_emitted: int) -> list[StepCounts]:
    """What each row's steps did, by the trace of its tokens. most_emitted: K + 1."""
    whole = RowTrace.read(state.trace)
    starts, ends = np.asarray(state.prompt_lengths), np.asarray(state.lengths) + 1
    rows = [whole[i, start:end] for i, (start, end) in enumerate(zip(starts, ends))]
    return [count_steps([row], most_emitted) for row in rows]


def histograms(state: SpeculationState, most_emitted: int) -> np.ndarray:
    """int[B, K + 2]: steps of each row by the tokens that they emitted."""
    return np.array([counts.histogram for counts in row_counts(state, most_emitted)])


def decode(
    target: Transformer,
    params: Params,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int | Sequence[int] = 40,
    max_steps: int = 1000,
    sparsity: SparsityPlan | None = None,
    **start: Any,
) -> tuple[list[list[int]], SpeculationState]:
    """Prompt and output of every row, and the last state."""
    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    state = prefilled(
        target,
        params,
        prompts,
        limits=[len(p) + n for p, n in zip(prompts, counts)],
        sparsity=sparsity,
        **start,
    )
    state = run_to_end(target, params, drafter, state, max_steps=max_steps, sparsity=sparsity)
    return sequences(state), state


def replace(config: ModelConfig, **changes: object) -> ModelConfig:
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]
