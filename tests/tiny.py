"""Tiny real models and a host loop around the jitted step, shared by the tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from sv_jax.config import ModelConfig
from sv_jax.model.transformer import Params, Transformer, random_params
from sv_jax.sharding import make_sharding
from sv_jax.speculation.loop import decode_slice
from sv_jax.speculation.prefill import prefill_chunk
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
NO_EOS = -1


def make_target(
    config: ModelConfig = TINY, mesh: tuple[int, int] = (1, 1), dtype: str = "float32"
) -> Transformer:
    return Transformer(config, dtype, make_sharding(config, mesh))


@functools.cache
def make_model(
    config: ModelConfig = TINY, mesh: tuple[int, int] = (1, 1), dtype: str = "float32", seed: int = 0
) -> tuple[Transformer, Params]:
    """A model with random weights, the same on every mesh."""
    target = make_target(config, mesh, dtype)
    return target, random_params(target, seed)


def random_prompts(lengths: Sequence[int], *, seed: int = 0, vocab_size: int = 64) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


def prefilled(
    target: Transformer,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Sequence[int],
    num_speculative_tokens: int,
    eos_ids: Sequence[Sequence[int]] | None = None,
    capacity: int = 128,
    chunk: int = 16,
) -> SpeculationState:
    """A state in which every prompt is committed and its first token emitted. [] pads the batch."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    eos = np.full((len(prompts), 2), NO_EOS, np.int32)  # one width: fewer programs to compile
    for ids, given in zip(eos, [] if eos_ids is None else eos_ids):
        ids[: len(given)] = given
    state = start_state(
        target,
        lengths,
        np.array(limits, np.int32),
        eos,
        capacity=capacity,
        num_speculative_tokens=max(8, num_speculative_tokens),  # likewise
    )
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
) -> SpeculationState:
    """Slices of `max_steps` until every row has finished; the cache doubles when a slice stops for it."""
    while True:
        before = int(state.statistics.steps)
        state = decode_slice(target, params, drafter, state, jnp.int32(max_steps))
        if bool(state.finished.all()):
            return state
        if int(state.statistics.steps) == before:
            capacity = state.cache.capacity * 2
            assert capacity <= max_capacity, "no progress"
            state = grow_state(target, state, capacity=capacity)


def sequences(state: SpeculationState) -> list[list[int]]:
    """Prompt and output of every row; [] for rows that pad the batch."""
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    pads = np.asarray(state.prompt_lengths) == 0
    return [[] if pad else row[: n + 1].tolist() for row, n, pad in zip(tokens, lengths, pads)]


def decode(
    target: Transformer,
    params: Params,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int | Sequence[int] = 40,
    max_steps: int = 1000,
    **start: object,
) -> tuple[list[list[int]], SpeculationState]:
    """Prompt and output of every row, and the last state."""
    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    state = prefilled(
        target,
        params,
        prompts,
        limits=[len(p) + n for p, n in zip(prompts, counts)],
        num_speculative_tokens=drafter.num_speculative_tokens,
        **start,  # type: ignore[arg-type]
    )
    state = run_to_end(target, params, drafter, state, max_steps=max_steps)
    return sequences(state), state


def replace(config: ModelConfig, **changes: object) -> ModelConfig:
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]
