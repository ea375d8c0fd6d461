"""Tiny GGUF files, written with the `gguf` package the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers.pre_tokenizers import ByteLevel

from sv_jax.config import ModelConfig

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> list[str]:
    """3 control tokens, 256 bytes, the results of MERGES, and padding to 272 (types: see below)."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), *merged]
    return tokens + [f"[PAD{i}]" for i in range(len(tokens), 272)]


def token_types() -> list[int]:
    tokens = vocabulary()
    return [3 if t in SPECIAL else 5 if t.startswith("[PAD") else 1 for t in tokens]


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the query and key of llama (its `permute`)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    body, _, kind = name.rpartition(".")
    if body.startswith("model.layers."):
        _, _, layer, rest = body.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[body]}.{kind}"


def write(
    path: Path,
    config: ModelConfig,
    contents: dict[str, np.ndarray],
    *,
    architecture: str | None = None,
    quantised: GGMLQuantizationType | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Write `contents` (Hugging Face names) as a GGUF file.

    quantised: type of the matrices. metadata: extra keys (strings, integers, floats or booleans).
    extra: tensors under GGUF names. drop: metadata keys of the tokenizer that are left out.
    """
    architecture = architecture or config.family
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    _add_tokenizer(writer, drop)
    for key, value in (metadata or {}).items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add[type(value)](key, value)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for name, value in contents.items():
        name = gguf_name(name)
        if architecture == "llama" and (part := name.split(".")[-2]) in heads:
            value = permute(value, heads[part])
        kind = quantised if quantised is not None and value.ndim == 2 else None
        stored = np.ascontiguousarray(value if kind is None else quants.quantize(value, kind))
        writer.add_tensor(name, stored, raw_dtype=kind)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, drop: tuple[str, ...]) -> None:
    parts = {
        "model": lambda: writer.add_tokenizer_model("gpt2"),
        "pre": lambda: writer.add_tokenizer_pre("smollm"),
        "tokens": lambda: writer.add_token_list(vocabulary()),
        "token_type": lambda: writer.add_token_types(token_types()),
        "merges": lambda: writer.add_token_merges(MERGES),
        "eos": lambda: writer.add_eos_token_id(2),
        "bos": lambda: writer.add_bos_token_id(1),
        "chat_template": lambda: writer.add_chat_template(CHATML),
    }
    for name, add in parts.items():
        if name not in drop:
            add()
