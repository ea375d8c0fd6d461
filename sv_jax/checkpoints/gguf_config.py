"""GGUF metadata -> the dictionaries of config.json and generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sv_jax.checkpoints.gguf_names import ARCHITECTURES
from sv_jax.config import UserError

TORCH_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# llama.cpp stops at these too, whatever the metadata's single eos_token_id says.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
CONTROL = 3  # llama.cpp's token type of special tokens
LLAMA3_CONTEXT = 8192  # what Llama 3 was pretrained with; GGUF files do not record it


def architecture_name(metadata: Mapping[str, Any]) -> str:
    """general.architecture, checked against the table of what can be converted."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(f"GGUF architecture {name!r} is not supported; allowed: {', '.join(ARCHITECTURES)}")
    if int(metadata.get("split.count", 1)) > 1:
        raise UserError(
            f"split GGUF (split.count={metadata['split.count']}) is not supported; merge the parts first"
        )
    if experts := metadata.get(f"{name}.expert_count"):
        raise UserError(f"GGUF with {name}.expert_count={experts} is not supported; allowed: dense models")
    return name


def config_dict(
    metadata: Mapping[str, Any], tensors: set[str], vocab_size: int, *, tied: bool
) -> dict[str, Any]:
    """config.json for a GGUF file.

    metadata: GGUF keys and values. tensors: GGUF tensor names (they alone tell which biases exist).
    vocab_size: rows of the embedding, padding included.
    Raises UserError for missing keys and for whatever config.json cannot express.
    """
    architecture = architecture_name(metadata)

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise UserError(f"GGUF metadata lacks {architecture}.{key}, which is required")
        return value

    heads, hidden = _uniform(need("attention.head_count")), int(need("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    _check_head_dims(get, head_dim)
    config = {
        "architectures": [TORCH_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": _uniform(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform(get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(need("context_length")),
        # Stored as float32; 9.999999747e-06 was 1e-05 before, and float32 arithmetic sees no difference.
        "rms_norm_eps": _short_float(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short_float(get("rope.freq_base", 10_000.0)),
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }
    config.update(_biases(architecture, tensors))
    return config


def _uniform(value: Any) -> int:
    """An integer that GGUF may store once, or once per layer."""
    values = {int(x) for x in (value if isinstance(value, list | tuple) else [value])}
    if len(values) != 1:
        raise UserError(
            f"GGUF layers of different sizes {sorted(values)} are not supported; allowed: one size"
        )
    return values.pop()


def _short_float(value: float) -> float:
    """The shortest decimal that is the same float32."""
    return float(str(np.float32(value)))


def _check_head_dims(get, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := int(get(key, head_dim))) != head_dim:
            raise UserError(f"GGUF {key}={value} is not supported; allowed: the head dimension, {head_dim}")


def _biases(architecture: str, tensors: set[str]) -> dict[str, bool]:
    """The bias flags of config.json, told by which tensors of layer 0 exist."""
    qkv = {f"blk.0.attn_{x}.bias" in tensors for x in "qkv"}
    output = "blk.0.attn_output.bias" in tensors
    if architecture == "qwen2":
        return {}  # always biased on q, k, v: the loader reports what is missing
    if qkv != {output}:
        raise UserError(
            "GGUF has biases on some of query, key, value and output only; allowed: on all of them or on none"
        )
    flags = {"attention_bias": output}
    return flags | ({"mlp_bias": "blk.0.ffn_gate.bias" in tensors} if architecture == "llama" else {})


def rope_scaling(
    metadata: Mapping[str, Any], config: Mapping[str, Any], factors: np.ndarray | None
) -> dict | None:
    """config.json's rope_scaling; factors: the rope_freqs tensor [head_dim / 2], if the file has one."""
    prefix = f"{metadata['general.architecture']}.rope."
    kind = metadata.get(f"{prefix}scaling.type", "none")
    factor = float(metadata.get(f"{prefix}scaling.factor", metadata.get(f"{prefix}scale_linear", 1.0)))
    original = int(metadata.get(f"{prefix}scaling.original_context_length", 0))
    if f"{prefix}scaling.type" not in metadata and f"{prefix}scale_linear" in metadata:
        kind = "linear"
    if float(metadata.get(f"{prefix}scaling.attn_factor", 1.0)) != 1.0:
        raise UserError(f"GGUF {prefix}scaling.attn_factor is not supported; allowed: absent or 1.0")
    if factors is not None and not np.allclose(factors, 1.0):
        return _llama3_scaling(config, factors, original)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = original or config["max_position_embeddings"]
        for key in ("beta_fast", "beta_slow"):
            if (value := metadata.get(f"{prefix}scaling.yarn_{key}")) is not None:
                scaling[key] = float(value)
        return scaling
    raise UserError(
        f"GGUF rope scaling {kind!r} is not supported; allowed: none, linear, yarn, llama3 factors"
    )


def _llama3_scaling(config: Mapping[str, Any], factors: np.ndarray, original: int) -> dict[str, Any]:
    """Recover Llama 3's four numbers from the divisors that llama.cpp's converter made of them.

    The largest divisor is `factor`. The others have one published value each; they are accepted only if
    the divisors computed from them are those of the file, so a wrong guess cannot pass.
    """
    factor = float(factors.max())
    for context in dict.fromkeys((original or LLAMA3_CONTEXT, LLAMA3_CONTEXT)):
        guess = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        expected = llama3_divisors(config["rope_theta"], config["head_dim"], guess)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return guess
    raise UserError(
        "GGUF rope_freqs.weight holds frequencies that are not Llama 3's; "
        "allowed: low_freq_factor 1, high_freq_factor 4, original context 8192"
    )


def llama3_divisors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> np.ndarray:
    """What Llama 3's scaling divides each rotary frequency by, [head_dim / 2]."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: every id that ends a generation, the metadata's own first."""
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends += [
        i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == CONTROL and token in END_TOKENS
    ]
    result: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(int(x) for x in ends if x is not None))}
    for key, name in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            result[name] = int(value)
    return result
