"""Tiny checkpoints of every family, and the parameter trees they load into. Numpy only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from sv_jax.checkpoints.hf_config import model_config
from sv_jax.checkpoints.resolve import Checkpoint
from sv_jax.config import ModelConfig

V, D, F, L, H, K, HD = 64, 32, 48, 2, 4, 2, 8
BASE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "head_dim": HD,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def config_dict(family: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, "model_type": family, **changes}


def _expert_names(config: ModelConfig, layer: int) -> tuple[str, str, tuple[str, str, str]]:
    """Hugging Face's names in a layer: of the router, of the experts, and of an expert's three matrices."""
    if config.family == "mixtral":
        block = f"model.layers.{layer}.block_sparse_moe"
        return f"{block}.gate.weight", f"{block}.experts", ("w1", "w3", "w2")
    block = f"model.layers.{layer}.mlp"
    return f"{block}.gate.weight", f"{block}.experts", ("gate_proj", "up_proj", "down_proj")


def tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors under Hugging Face's names, written out by hand (not from the tables under test)."""
    rng = np.random.default_rng(seed)
    c, result = config, {}

    def add(name: str, *shape: int) -> None:
        result[name] = rng.standard_normal(shape).astype(np.float32)

    add("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{p}{norm}.weight", c.hidden_size)
        for name, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            add(f"{p}self_attn.{name}_proj.weight", heads * c.head_dim, c.hidden_size)
            if c.attention_bias:
                add(f"{p}self_attn.{name}_proj.bias", heads * c.head_dim)
        add(f"{p}self_attn.o_proj.weight", c.hidden_size, c.num_heads * c.head_dim)
        if c.attention_output_bias:
            add(f"{p}self_attn.o_proj.bias", c.hidden_size)
        if c.qk_norm:
            whole = c.qk_norm == "projection"
            add(f"{p}self_attn.q_norm.weight", c.head_dim * (c.num_heads if whole else 1))
            add(f"{p}self_attn.k_norm.weight", c.head_dim * (c.num_kv_heads if whole else 1))
        if c.has_experts(i):
            router, experts, (gate, up, down) = _expert_names(c, i)
            add(router, c.moe.num_experts, c.hidden_size)
            for e in range(c.moe.num_experts):
                add(f"{experts}.{e}.{gate}.weight", c.moe.expert_size, c.hidden_size)
                add(f"{experts}.{e}.{up}.weight", c.moe.expert_size, c.hidden_size)
                add(f"{experts}.{e}.{down}.weight", c.hidden_size, c.moe.expert_size)
            if shared := c.moe.shared_expert_size:
                add(f"{p}mlp.shared_expert.gate_proj.weight", shared, c.hidden_size)
                add(f"{p}mlp.shared_expert.up_proj.weight", shared, c.hidden_size)
                add(f"{p}mlp.shared_expert.down_proj.weight", c.hidden_size, shared)
                add(f"{p}mlp.shared_expert_gate.weight", 1, c.hidden_size)
            continue
        for name, out, into in (
            ("gate", c.intermediate_size, c.hidden_size),
            ("up", c.intermediate_size, c.hidden_size),
            ("down", c.hidden_size, c.intermediate_size),
        ):
            add(f"{p}mlp.{name}_proj.weight", out, into)
            if c.mlp_bias:
                add(f"{p}mlp.{name}_proj.bias", out)
    add("model.norm.weight", c.hidden_size)
    if not c.tie_word_embeddings:
        add("lm_head.weight", c.vocab_size, c.hidden_size)
    return result


def save(
    directory: Path,
    config: dict[str, Any],
    contents: dict[str, np.ndarray],
    *,
    shards: int = 1,
    index: bool = True,
) -> Checkpoint:
    """Write a Hugging Face directory of `shards` files and return its checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(contents)
    weight_map = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: np.ascontiguousarray(contents[name]) for name in names[shard::shards]}
        save_file(part, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1 and index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(text)
    return Checkpoint(directory, model_config(config), (), "tiny")


Placer = Callable[[str, tuple[int, ...]], Any]


def tree(config: ModelConfig, *, dtype: Any = np.float32, place: Placer | None = None):
    """The abstract parameters of a model; place(path, shape) gives each leaf's sharding."""
    c, flat = config, {}

    def leaf(path: str, *shape: int) -> None:
        flat[path] = jax.ShapeDtypeStruct(shape, dtype, sharding=place(path, shape) if place else None)

    def linear(path: str, out: int, into: int, bias: bool) -> None:
        leaf(f"{path}/kernel", into, out)
        if bias:
            leaf(f"{path}/bias", out)

    leaf("embedding/embedding", c.vocab_size, c.hidden_size)
    for i in range(c.num_layers):
        p = f"layers_{i}"
        leaf(f"{p}/attention_norm/scale", c.hidden_size)
        leaf(f"{p}/ffn_norm/scale", c.hidden_size)
        for name, heads in (("query", c.num_heads), ("key", c.num_kv_heads), ("value", c.num_kv_heads)):
            linear(f"{p}/attention/{name}", heads * c.head_dim, c.hidden_size, c.attention_bias)
        linear(f"{p}/attention/output", c.hidden_size, c.num_heads * c.head_dim, c.attention_output_bias)
        if c.qk_norm:
            whole = c.qk_norm == "projection"
            leaf(f"{p}/attention/query_norm/scale", c.head_dim * (c.num_heads if whole else 1))
            leaf(f"{p}/attention/key_norm/scale", c.head_dim * (c.num_kv_heads if whole else 1))
        if c.has_experts(i):
            e, f, d = c.moe.num_experts, c.moe.expert_size, c.hidden_size
            linear(f"{p}/ffn/router", e, d, False)
            leaf(f"{p}/ffn/experts/gate", e, d, f)
            leaf(f"{p}/ffn/experts/up", e, d, f)
            leaf(f"{p}/ffn/experts/down", e, f, d)
            if shared := c.moe.shared_expert_size:
                linear(f"{p}/ffn/shared/gate", shared, d, False)
                linear(f"{p}/ffn/shared/up", shared, d, False)
                linear(f"{p}/ffn/shared/down", d, shared, False)
                linear(f"{p}/ffn/shared_gate", 1, d, False)
            continue
        linear(f"{p}/ffn/gate", c.intermediate_size, c.hidden_size, c.mlp_bias)
        linear(f"{p}/ffn/up", c.intermediate_size, c.hidden_size, c.mlp_bias)
        linear(f"{p}/ffn/down", c.hidden_size, c.intermediate_size, c.mlp_bias)
    leaf("final_norm/scale", c.hidden_size)
    if not c.tie_word_embeddings:
        linear("head", c.vocab_size, c.hidden_size, False)
    return nest(flat)


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return result


def expected(contents: dict[str, np.ndarray], config: ModelConfig) -> dict[str, Any]:
    """The parameters that `contents` must become, spelled out without the tables under test."""
    flat = {"embedding/embedding": contents["model.embed_tokens.weight"]}
    flat["final_norm/scale"] = contents["model.norm.weight"]
    if "lm_head.weight" in contents and not config.tie_word_embeddings:
        flat["head/kernel"] = contents["lm_head.weight"].T
    for i in range(config.num_layers):
        hf, ours = f"model.layers.{i}", f"layers_{i}"
        flat[f"{ours}/attention_norm/scale"] = contents[f"{hf}.input_layernorm.weight"]
        flat[f"{ours}/ffn_norm/scale"] = contents[f"{hf}.post_attention_layernorm.weight"]
        pairs = {"query": "q", "key": "k", "value": "v", "output": "o"}
        modules = {f"attention/{a}": f"self_attn.{b}_proj" for a, b in pairs.items()}
        if config.has_experts(i):
            router, experts, names = _expert_names(config, i)
            flat[f"{ours}/ffn/router/kernel"] = contents[router].T
            for a, b in zip(("gate", "up", "down"), names):
                each = [contents[f"{experts}.{e}.{b}.weight"].T for e in range(config.moe.num_experts)]
                flat[f"{ours}/ffn/experts/{a}"] = np.stack(each)
            if config.moe.shared_expert_size:
                modules |= {f"ffn/shared/{a}": f"mlp.shared_expert.{a}_proj" for a in ("gate", "up", "down")}
                modules["ffn/shared_gate"] = "mlp.shared_expert_gate"
        else:
            modules |= {f"ffn/{a}": f"mlp.{a}_proj" for a in ("gate", "up", "down")}
        for a, b in modules.items():
            flat[f"{ours}/{a}/kernel"] = contents[f"{hf}.{b}.weight"].T
            if f"{hf}.{b}.bias" in contents:
                flat[f"{ours}/{a}/bias"] = contents[f"{hf}.{b}.bias"]
        for a, b in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            if f"{hf}.self_attn.{b}.weight" in contents:
                flat[f"{ours}/attention/{a}/scale"] = contents[f"{hf}.self_attn.{b}.weight"]
    return nest(flat)


def assert_same(loaded: Any, wanted: Any) -> None:
    """Equal trees: same paths, same numbers, bit for bit."""
    assert jax.tree.structure(loaded) == jax.tree.structure(wanted)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(loaded), jax.tree.leaves(wanted)):
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=jax.tree_util.keystr(path))
