"""What each platform gets: how heads lie in the cache, the width of a plain step, how experts multiply."""

from __future__ import annotations

import math

IMPLEMENTATIONS = ("xla", "pallas_tpu", "pallas_tpu_interpret")
"""Of block-sparse attention: plain XLA, the Mosaic kernel, and that kernel's arithmetic on any platform."""

LANES = 128  # of a TPU's vector registers, and of the tiles that arrays lie in
MOST_STEP_TOKENS = 64  # T, of a row in a verify step: what the kernels are made for

FEW_TOKENS = 256
"""Of all rows, for which a TPU multiplies by a bfloat16 weight about as fast as it reads one: a v5e in 197
TFLOP/s and 819 GB/s, 240 tokens. More, those of prefill, meet experts in ragged products, which take
temporaries for all pairs of a token and an expert: 300 MiB a v5e chip for Qwen3's verify steps of 4 rows."""


def heads_per_group(platform: str, head_dim: int, kv_heads: int) -> int:
    """KV heads p that lie side by side in the last axis of the cache, [B, K / p, S, p * head_dim].

    On TPU arrays lie in tiles of 128 lanes: heads of 64 would leave half of the memory empty, so as many lie
    side by side as make whole tiles, if that divides the heads. Elsewhere each head lies alone.

    Args:
      kv_heads: those of one device.
    """
    if platform != "tpu":
        return 1
    group = math.lcm(head_dim, LANES) // head_dim
    return group if kv_heads % group == 0 else 1


def attention_implementation(platform: str) -> str:
    """What attends to the cache in a verify step unless an implementation is named; shapes may still ask for
    "xla"."""
    return "pallas_tpu" if platform == "tpu" else "xla"


def plain_step_tokens(platform: str, dtype: str, rows: int) -> int:
    """Tokens T that a step without drafts computes per row.

    One, except where the product of a single bfloat16 vector with a matrix misses XLA's fast path: on CPU
    it reads weights at a fifth of the rate of two vectors (docs/performance.md). In float32 the single
    vector is the fast one.
    """
    return 2 if platform == "cpu" and dtype == "bfloat16" and rows == 1 else 1


def lies_by_columns(platform: str, rows: int, columns: int) -> bool:
    """Whether a matrix [rows, columns] of one device comes into a program column by column.

    On TPU it does where that alone leaves no lane of its tiles empty: a vocabulary of 2 * 75,968 columns, cut
    in two, has no whole number of tiles.
    """
    return platform == "tpu" and columns % LANES != 0 and rows % LANES == 0


def expert_products(platform: str, tokens: int) -> str:
    """How `tokens` tokens meet the experts of a mixture: "tiles", "whole" or "ragged".

    "tiles": a loop over tiles of the tokens of one expert; elsewhere than on TPU it is the fastest
    (scripts/bench_moe.py). "whole": a loop over active experts with all tokens in each product, which on TPU
    is for free up to FEW_TOKENS. "ragged": `jax.lax.ragged_dot`; XLA has an instruction for it on TPU
    alone. A verify step is to read its active experts and no others: both loops do.
    """
    if platform != "tpu":
        return "tiles"
    return "whole" if tokens <= FEW_TOKENS else "ragged"
