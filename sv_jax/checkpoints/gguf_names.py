"""How GGUF files name things: one table per architecture, from GGUF tensors to Hugging Face tensors."""

from __future__ import annotations

import dataclasses

TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
QKV_BIAS = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
OUTPUT_BIAS = {"attn_output.bias": "self_attn.o_proj.bias"}
MLP_BIAS = {f"ffn_{x}.bias": f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")}
QK_NORM = {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture is laid out.

    permuted: whether rows of query and key come in interleaved RoPE pairs (llama.cpp's converter does
      that to `llama` alone, to which it also converts mistral).
    skipped: tensors that carry nothing the model needs (rope_freqs is turned into config.json's
      rope_scaling, not copied).
    tied_duplicate: of these two tensors, if both are there and hold the same matrix, the first is used
      for both roles and the second is skipped.
    """

    layer: dict[str, str]
    permuted: bool
    skipped: tuple[str, ...] = ("rope_freqs.weight",)
    tied_duplicate: tuple[str, str] = ("output.weight", "token_embd.weight")


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture({**LAYER, **QKV_BIAS, **OUTPUT_BIAS, **MLP_BIAS}, permuted=True),
    "qwen2": Architecture({**LAYER, **QKV_BIAS}, permuted=False),
    "qwen3": Architecture({**LAYER, **QKV_BIAS, **OUTPUT_BIAS, **QK_NORM}, permuted=False),
}


def hugging_face_name(architecture: Architecture, tensor: str) -> str | None:
    """Hugging Face's name of a GGUF tensor, e.g. blk.3.attn_q.weight; None when the table has none."""
    if tensor in TOP_LEVEL:
        return TOP_LEVEL[tensor]
    prefix, _, rest = tensor.partition(".")
    layer, _, name = rest.partition(".")
    if prefix != "blk" or not layer.isdigit() or name not in architecture.layer:
        return None
    return f"model.layers.{layer}.{architecture.layer[name]}"
