"""Which tensor of a Hugging Face checkpoint each parameter comes from: one table per family."""

from __future__ import annotations

import dataclasses
import re

from sv_jax.config import Family

TOP_LEVEL = {
    "embedding/embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}
DENSE_LAYER = {
    "layers_{i}/attention_norm/scale": "model.layers.{i}.input_layernorm.weight",
    "layers_{i}/attention/query/kernel": "model.layers.{i}.self_attn.q_proj.weight",
    "layers_{i}/attention/key/kernel": "model.layers.{i}.self_attn.k_proj.weight",
    "layers_{i}/attention/value/kernel": "model.layers.{i}.self_attn.v_proj.weight",
    "layers_{i}/attention/output/kernel": "model.layers.{i}.self_attn.o_proj.weight",
    "layers_{i}/ffn_norm/scale": "model.layers.{i}.post_attention_layernorm.weight",
    "layers_{i}/ffn/gate/kernel": "model.layers.{i}.mlp.gate_proj.weight",
    "layers_{i}/ffn/up/kernel": "model.layers.{i}.mlp.up_proj.weight",
    "layers_{i}/ffn/down/kernel": "model.layers.{i}.mlp.down_proj.weight",
}
EXPERTS = {
    "layers_{i}/ffn/router/kernel": "model.layers.{i}.mlp.gate.weight",
    "layers_{i}/ffn/experts/gate": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
    "layers_{i}/ffn/experts/up": "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    "layers_{i}/ffn/experts/down": "model.layers.{i}.mlp.experts.{e}.down_proj.weight",
}
SHARED_EXPERT = {
    "layers_{i}/ffn/shared/gate/kernel": "model.layers.{i}.mlp.shared_expert.gate_proj.weight",
    "layers_{i}/ffn/shared/up/kernel": "model.layers.{i}.mlp.shared_expert.up_proj.weight",
    "layers_{i}/ffn/shared/down/kernel": "model.layers.{i}.mlp.shared_expert.down_proj.weight",
    "layers_{i}/ffn/shared_gate/kernel": "model.layers.{i}.mlp.shared_expert_gate.weight",
}
MIXTRAL_EXPERTS = {
    "layers_{i}/ffn/router/kernel": "model.layers.{i}.block_sparse_moe.gate.weight",
    "layers_{i}/ffn/experts/gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    "layers_{i}/ffn/experts/up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
    "layers_{i}/ffn/experts/down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
}
QKV_BIAS = {
    "layers_{i}/attention/query/bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers_{i}/attention/key/bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers_{i}/attention/value/bias": "model.layers.{i}.self_attn.v_proj.bias",
}
OUTPUT_BIAS = {"layers_{i}/attention/output/bias": "model.layers.{i}.self_attn.o_proj.bias"}
MLP_BIAS = {
    "layers_{i}/ffn/gate/bias": "model.layers.{i}.mlp.gate_proj.bias",
    "layers_{i}/ffn/up/bias": "model.layers.{i}.mlp.up_proj.bias",
    "layers_{i}/ffn/down/bias": "model.layers.{i}.mlp.down_proj.bias",
}
QK_NORM = {
    "layers_{i}/attention/query_norm/scale": "model.layers.{i}.self_attn.q_norm.weight",
    "layers_{i}/attention/key_norm/scale": "model.layers.{i}.self_attn.k_norm.weight",
}
# Rotary frequencies follow from the config; old checkpoints store them all the same.
ROTARY = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class TensorTable:
    """params: parameter path -> tensor name, {i} being the layer. skipped: patterns of ignored tensors.

    A name with {e} stands for one tensor an expert: the parameter has them one behind the other.
    """

    params: dict[str, str]
    skipped: tuple[str, ...] = ROTARY

    def tensor_name(self, path: str) -> str | None:
        """The tensor that parameter `path` (e.g. layers_3/ffn/up/kernel) is read from; None: unknown.

        With {e} in it for parameters of all experts.
        """
        match = re.match(r"layers_(\d+)/", path)
        template = self.params.get(re.sub(r"^layers_\d+/", "layers_{i}/", path))
        if template is None:
            return None
        return template.replace("{i}", match[1]) if match else template

    @staticmethod
    def is_transposed(path: str) -> bool:
        """Whether parameter `path` is its tensor's transpose: kernels are [in, out], tensors [out, in]."""
        return path.endswith("/kernel") or "/experts/" in path

    def is_skipped(self, tensor: str) -> bool:
        return any(re.fullmatch(pattern, tensor) for pattern in self.skipped)


TABLES: dict[Family, TensorTable] = {
    "llama": TensorTable({**TOP_LEVEL, **DENSE_LAYER, **QKV_BIAS, **OUTPUT_BIAS, **MLP_BIAS}),
    "mistral": TensorTable({**TOP_LEVEL, **DENSE_LAYER}),
    "qwen2": TensorTable({**TOP_LEVEL, **DENSE_LAYER, **QKV_BIAS}),
    "qwen3": TensorTable({**TOP_LEVEL, **DENSE_LAYER, **QKV_BIAS, **OUTPUT_BIAS, **QK_NORM}),
    "mixtral": TensorTable({**TOP_LEVEL, **DENSE_LAYER, **MIXTRAL_EXPERTS}),
    "qwen2_moe": TensorTable({**TOP_LEVEL, **DENSE_LAYER, **QKV_BIAS, **EXPERTS, **SHARED_EXPERT}),
    "qwen3_moe": TensorTable({**TOP_LEVEL, **DENSE_LAYER, **QKV_BIAS, **OUTPUT_BIAS, **QK_NORM, **EXPERTS}),
    "olmoe": TensorTable({**TOP_LEVEL, **DENSE_LAYER, **QKV_BIAS, **OUTPUT_BIAS, **QK_NORM, **EXPERTS}),
}
