"""config.json -> ModelConfig, with transformers' defaults for absent keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sv_jax.config import FAMILIES, ModelConfig, MoEConfig, RopeScaling, UserError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "swish")  # two names of one function
# What each family's transformers class assumes when config.json is silent. (All: tie_word_embeddings false.)
DEFAULT_MAX_POSITIONS: Mapping[str, int] = {
    "llama": 2048,
    "mistral": 131_072,
    "qwen2": 32_768,
    "qwen3": 32_768,
    "mixtral": 131_072,
    "qwen2_moe": 32_768,
    "qwen3_moe": 32_768,
    "olmoe": 4096,
}
DEFAULT_KV_HEADS: Mapping[str, int | None] = {
    "llama": None,
    "mistral": 8,
    "qwen2": 32,
    "qwen3": 32,
    "mixtral": 8,
    "qwen2_moe": 16,
    "qwen3_moe": 4,
    "olmoe": None,
}
DEFAULT_THETA = {"mixtral": 1e6}  # others: 10,000
DEFAULT_EPSILON = {"mixtral": 1e-5, "olmoe": 1e-5}  # others: 1e-6
DEFAULT_EXPERTS: Mapping[str, tuple[int, int]] = {  # of them, used by each token
    "mixtral": (8, 2),
    "qwen2_moe": (60, 4),
    "qwen3_moe": (128, 8),
    "olmoe": (64, 8),
}
DEFAULT_EXPERT_SIZE = {"qwen2_moe": 1408, "qwen3_moe": 768}
DEFAULT_SHARED_EXPERT_SIZE = 5632
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def read_config(directory: Path) -> ModelConfig:
    """ModelConfig of a Hugging Face directory. Raises UserError, see `model_config`."""
    return model_config(read_json(directory / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError if it is missing, broken or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} lacks {path.name}") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; a JSON object is expected")
    return content


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """The architecture that a config.json describes.

    Raises UserError for a model type, activation, rope type, layer type or quantisation that is not
    implemented, and for required keys that are missing. `auto_map` is ignored: no checkpoint's code runs.
    """
    family = _family(config)
    if quantization := config.get("quantization_config"):
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        )
        raise UserError(
            f"quantization_config {method!r} is not supported; allowed: float32, bfloat16, float16"
        )
    activation = config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise UserError(f"hidden_act {activation!r} is not supported; allowed: {', '.join(ACTIVATIONS)}")
    heads, layers = _need(config, "num_attention_heads"), _need(config, "num_hidden_layers")
    hidden = _need(config, "hidden_size")
    max_positions = int(config.get("max_position_embeddings") or DEFAULT_MAX_POSITIONS[family])
    biased = family in ("llama", "qwen3", "qwen3_moe", "olmoe")
    attention_bias = biased and bool(config.get("attention_bias", False))
    if config.get("clip_qkv") is not None:
        raise UserError(f"clip_qkv={config['clip_qkv']!r} is not supported; allowed: null")
    theta, scaling = _rope(config, family, max_positions)
    return ModelConfig(
        family=family,
        vocab_size=_need(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_need(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads", DEFAULT_KV_HEADS[family]) or heads),
        head_dim=_head_dim(config, family, hidden, heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=float(config.get("rms_norm_eps", DEFAULT_EPSILON.get(family, 1e-6))),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=attention_bias
        or family == "qwen2"
        or (family == "qwen2_moe" and bool(config.get("qkv_bias", True))),
        attention_output_bias=attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm="head" if family in ("qwen3", "qwen3_moe") else "projection" if family == "olmoe" else None,
        sliding_windows=_sliding_windows(config, family, layers),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        moe=_moe(config, family),
        dense_ffn_layers=_dense_ffn_layers(config, family, layers),
    )


def _moe(config: Mapping[str, Any], family: str) -> MoEConfig | None:
    if family not in DEFAULT_EXPERTS:
        return None
    experts, used = DEFAULT_EXPERTS[family]
    # The second name is Mixtral's; files of the others have the first, or both.
    named = {"num_experts": config.get("num_experts", config.get("num_local_experts", experts))}
    named["num_experts_per_tok"] = config.get("num_experts_per_tok", used)
    if family in DEFAULT_EXPERT_SIZE:
        size = {"moe_intermediate_size": config.get("moe_intermediate_size", DEFAULT_EXPERT_SIZE[family])}
    else:
        size = {"intermediate_size": config.get("intermediate_size")}
    shared = 0
    if family == "qwen2_moe":
        key = "shared_expert_intermediate_size"
        shared = _need({key: config.get(key, DEFAULT_SHARED_EXPERT_SIZE)}, key)
    return MoEConfig(
        num_experts=_need(named, "num_experts"),
        num_experts_per_tok=_need(named, "num_experts_per_tok"),
        expert_size=_need(size, next(iter(size))),
        norm_topk_prob=family == "mixtral" or bool(config.get("norm_topk_prob", False)),
        shared_expert_size=shared,
    )


def _dense_ffn_layers(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    """Layers without experts: Qwen's mlp_only_layers, and those between every decoder_sparse_step-th."""
    if family not in ("qwen2_moe", "qwen3_moe"):
        return ()
    only, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step", 1))
    if step < 1:
        raise UserError(f"decoder_sparse_step={step} is not allowed; allowed: 1 or more")
    return tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step)


def _family(config: Mapping[str, Any]):
    name = config.get("model_type")
    if name is None and config.get("architectures"):
        name = str(config["architectures"][0]).removesuffix("ForCausalLM").lower()
        name = name.replace("moe", "_moe") if name.startswith("qwen") else name
    if name not in FAMILIES:
        raise UserError(f"model_type {name!r} is not supported; allowed: {', '.join(FAMILIES)}")
    return name


def _need(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UserError(f"config.json has {key}={value!r}; a positive integer is required")
    return value


def _head_dim(config: Mapping[str, Any], family: str, hidden: int, heads: int) -> int:
    default = 128 if family == "qwen3" else None
    if head_dim := config.get("head_dim", default):
        return int(head_dim)
    if hidden % heads:
        raise UserError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}; set head_dim"
        )
    return hidden // heads


def _rope(config: Mapping[str, Any], family: str, max_positions: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from rope_theta and rope_scaling, or from transformers 5's rope_parameters."""
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA.get(family, 1e4))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UserError(f"rope type {kind!r} is not supported; allowed: {', '.join(ROPE_TYPES)}")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if float(partial) != 1.0:
        raise UserError(f"partial_rotary_factor={partial} is not supported; allowed: 1.0")
    if kind == "default":
        return theta, None
    return theta, _rope_scaling(kind, parameters, config, max_positions)


def _rope_scaling(
    kind: Any, parameters: Mapping[str, Any], config: Mapping[str, Any], max_positions: int
) -> RopeScaling:
    original = int(
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or max_positions
    )
    factor = parameters.get("factor")
    if factor is None and kind == "yarn":
        factor = max_positions / original
    needed: dict[str, Any] = {"factor": factor}
    if kind == "llama3":
        needed |= {key: parameters.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    if missing := [key for key, value in needed.items() if value is None]:
        raise UserError(f"rope type {kind!r} of config.json lacks {', '.join(missing)}")
    factor = float(needed["factor"])
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=parameters.get("attention_factor"),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )


def _sliding_windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Per-layer windows; () when every layer sees everything."""
    window = config.get("sliding_window", None if family == "mixtral" else DEFAULT_WINDOW)
    if family in ("llama", "olmoe") or window is None:
        return ()
    if family in ("mistral", "mixtral"):
        return (int(window),) * layers
    if not config.get("use_sliding_window", False):
        return ()
    if family == "qwen3_moe":
        return (int(window),) * layers
    types = config.get("layer_types")
    if types is None and family == "qwen2_moe":  # every other layer, among the first ones
        last = int(config.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS))
        types = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(layers)]
    if types is None:
        first = int(config.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS))
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if unknown := sorted(set(types) - {"sliding_attention", "full_attention"}):
        raise UserError(
            f"layer type {unknown[0]!r} is not supported; allowed: full_attention, sliding_attention"
        )
    windows = tuple(int(window) if kind == "sliding_attention" else None for kind in types)
    return windows if any(windows) else ()
