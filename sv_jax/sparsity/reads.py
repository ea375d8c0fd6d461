"""Bytes that attention reads."""

from __future__ import annotations

import numpy as np

from sv_jax.config import ModelConfig
from sv_jax.sparsity.plan import AttentionPlan
from sv_jax.sparsity.summaries import vectors_per_block

SUMMARY_ITEMSIZE = 4  # float32


def kv_bytes(model: ModelConfig, itemsize: int) -> int:
    """Of K and V of one position of one KV head in one layer."""
    return 2 * model.head_dim * itemsize


def summary_bytes(plan: AttentionPlan, model: ModelConfig, lengths: int | np.ndarray) -> int | np.ndarray:
    """Of the block summaries that a step's scores read, over layers and KV heads, at `lengths` tokens."""
    blocks = -(-lengths // plan.block_size)
    vectors = len(plan.anchors) * model.num_kv_heads * blocks * vectors_per_block(plan.score, plan.block_size)
    return vectors * model.head_dim * SUMMARY_ITEMSIZE
