"""Deployments of tiny models, and the models behind them on emulated devices."""

from __future__ import annotations

from typing import Any

from sv_jax.config import ModelConfig, MoEConfig
from sv_jax.planning.deployment import Deployment
from tests.tiny import TINY, replace

# Like SmolLM2's 9 and 3 heads: neither divides by 2. Nor does the vocabulary.
ODD = replace(TINY, hidden_size=36, num_heads=9, num_kv_heads=3, head_dim=4, vocab_size=61)
BIASED = replace(
    TINY,
    family="qwen2",
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    tie_word_embeddings=False,
)
MOE = replace(
    TINY,
    family="qwen2_moe",
    num_layers=3,
    qk_norm="head",
    tie_word_embeddings=False,
    moe=MoEConfig(8, 2, 16, norm_topk_prob=True, shared_expert_size=24),
    dense_ffn_layers=(1,),
)


def deploy(config: ModelConfig = TINY, mesh: tuple[int, int] = (1, 1), **changes: Any) -> Deployment:
    """On GPUs, whose cache is laid out as the emulated devices' is, unless it is told otherwise."""
    question: dict[str, Any] = {
        "name": "tiny",
        "platform": "gpu:h100",
        "dtype": "bfloat16",
        "max_model_len": 200,
        "batch_size": 4,
        "num_speculative_tokens": 7,
    }
    return Deployment(config=config, mesh=mesh, **question | changes)


def bytes_on_a_device(tree: Any) -> int:
    """What the first device holds of a tree of arrays."""
    import jax

    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
