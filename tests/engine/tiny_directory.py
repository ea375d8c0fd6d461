"""A tiny Hugging Face directory with a tokenizer, and its model written once more in numpy."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken

from sv_jax.checkpoints.hf_config import model_config
from sv_jax.config import ModelConfig
from sv_jax.engine.lossless import NEAR_TIE
from tests.checkpoints import tiny

V = tiny.V
CONTEXT = 1100  # two cache sizes, 512 and 1024, can be outgrown
WORDS = [f"w{i}" for i in range(V)]
CONFIG = tiny.config_dict("llama", max_position_embeddings=CONTEXT, num_hidden_layers=1)


@functools.cache
def contents() -> dict[str, np.ndarray]:
    """Weights for logits of about 1: their differences are far above float32's errors."""
    scaled = {}
    for name, value in tiny.tensors(model_config(CONFIG)).items():
        matrix = value.ndim == 2
        scaled[name] = value * value.shape[-1] ** -0.5 if matrix else 1 + np.float32(0.3) * value
    return scaled


def write(
    directory: Path,
    *,
    eos: Sequence[int] = (),
    special: Sequence[int] = (),
    words: int = V,
    **changes: Any,
) -> Path:
    """A directory whose words w0, w1, .. are its tokens. `special` ids have no text; `eos` ids end a row.

    words: tokens that the tokenizer has; the model goes on to V.
    """
    tiny.save(directory, CONFIG | changes, contents())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))
    level = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS[:words])}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(level)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(WORDS[i]) for i in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V, n).tolist() for n in lengths]


def _normalised(x: np.ndarray, scale: np.ndarray, config: ModelConfig) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * scale


def _rotated(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """x [N, heads, D] at positions 0 .. N-1."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(len(x))[:, None, None] * frequencies
    left, right = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def _attended(x: np.ndarray, p: str, config: ModelConfig) -> np.ndarray:
    weights = contents()
    q, k, v = (
        (x @ weights[f"{p}.{name}_proj.weight"].T).reshape(len(x), -1, config.head_dim) for name in "qkv"
    )
    group = config.num_heads // config.num_kv_heads
    q, k, v = _rotated(q, config), _rotated(k, config).repeat(group, 1), v.repeat(group, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1) @ weights[f"{p}.o_proj.weight"].T


def _fed_forward(x: np.ndarray, p: str) -> np.ndarray:
    gate, up, down = (contents()[f"{p}.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


def reference_logits(tokens: Sequence[int]) -> np.ndarray:
    """float64[N, V]: the logits after every token of one sequence, all positions recomputed."""
    config, weights = model_config(CONFIG), contents()
    x = weights["model.embed_tokens.weight"].astype(np.float64)[list(tokens)]
    for i in range(config.num_layers):
        p = f"model.layers.{i}"
        x = x + _attended(
            _normalised(x, weights[f"{p}.input_layernorm.weight"], config), f"{p}.self_attn", config
        )
        x = x + _fed_forward(
            _normalised(x, weights[f"{p}.post_attention_layernorm.weight"], config), f"{p}.mlp"
        )
    return _normalised(x, weights["model.norm.weight"], config) @ weights["lm_head.weight"].T


def assert_greedy(prompt: Sequence[int], output: Sequence[int]) -> None:
    """Every token is the reference's argmax after those before it: by induction, its greedy output."""
    logits = reference_logits([*prompt, *output])[len(prompt) - 1 : -1]
    chosen = np.take_along_axis(logits, np.array(output)[:, None], 1)[:, 0]
    behind = logits.max(-1) - chosen
    assert behind.max() < NEAR_TIE, f"output token {behind.argmax()} is {behind.max():.3f} below the best"
