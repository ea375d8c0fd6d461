"""transformers as the second opinion: random models, their logits, and our logits for the same files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.checkpoints import load_params, resolve
from sv_jax.model.cache import KVCache
from sv_jax.model.transformer import Params, Transformer, abstract_params
from sv_jax.sharding import make_sharding
from sv_jax.speculation.prefill import prefill_chunk
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import start_state
from sv_jax.speculation.types import Draft
from sv_jax.speculation.verify import verify

VOCAB, STEP = 96, 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16_384,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def random_model(family: str, **changes: Any) -> Any:
    """A transformers model in which every parameter matters: biases and norms are random too."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:  # of all experts in one: 3
                # Logits of several units, and attention that is far from uniform.
                gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(noise * 0.3 + (1.0 if "norm" in name else 0.0))
    return model


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32[N, V] of transformers for one sequence."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens[None].astype(np.int64)), use_cache=False).logits[0].numpy()


def load(directory: Path) -> tuple[Transformer, Params]:
    checkpoint = resolve(str(directory), progress=False)
    target = Transformer(checkpoint.config, "float32", make_sharding(checkpoint.config))
    params = load_params(checkpoint, abstract_params(target), progress=False)
    return target, params


@functools.partial(jax.jit, static_argnames=("target",))
def _whole(target: Transformer, params: Params, cache: KVCache, tokens: jax.Array) -> jax.Array:
    parents = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None] - 1
    return verify(target, params, cache, jnp.zeros(1, jnp.int32), Draft(tokens[None], parents)).logits[0]


def _state(target: Transformer, num_tokens: int, capacity: int) -> Any:
    return start_state(target, make_request([num_tokens], [num_tokens + 1]), capacity=capacity)


def whole_logits(target: Transformer, params: Params, tokens: np.ndarray) -> np.ndarray:
    """float32[N, V]: every token in one forward pass, over an empty cache."""
    return np.asarray(_whole(target, params, _state(target, 1, 8).cache, jnp.asarray(tokens, jnp.int32)))


@functools.partial(jax.jit, static_argnames=("target",))
def _steps(target: Transformer, params: Params, cache: KVCache, tokens: jax.Array) -> jax.Array:
    parents = jnp.arange(STEP, dtype=jnp.int32)[None] - 1

    def at(start: jax.Array) -> jax.Array:
        draft = Draft(jax.lax.dynamic_slice(tokens, (start,), (STEP,))[None], parents)
        return verify(target, params, cache, start[None], draft).logits[0]

    starts = jnp.arange(0, tokens.shape[0], STEP, dtype=jnp.int32)
    return jax.lax.map(at, starts).reshape(tokens.shape[0], -1)


def stepped_logits(
    target: Transformer, params: Params, tokens: np.ndarray, *, chunk: int
) -> tuple[np.ndarray, int]:
    """Prefill in chunks, then verify steps of T = 8 over the cache at every position.

    Returns float32[N, V], and the token that the prefill emitted.
    """
    count = len(tokens)
    assert count % STEP == 0
    padded = np.zeros(-(-count // chunk) * chunk, np.int32)
    padded[:count] = tokens
    state = _state(target, count, len(padded) + chunk)
    for start in range(0, count, chunk):
        state = prefill_chunk(target, params, state, padded[None, start : start + chunk])
    logits = _steps(target, params, state.cache, jnp.asarray(tokens, jnp.int32))
    return np.asarray(logits), int(state.tokens[0, count])
