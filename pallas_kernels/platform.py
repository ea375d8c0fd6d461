"""What each platform gets: the cache's layout, the width of a plain step, how experts multiply."""

from __future__ import annotations

from typing import Literal

Layout = Literal["BKSD", "BSKD"]
"""Axis order of one layer's K or V: B batch, K KV heads, S positions, D head_dim."""

MOST_TILED_TOKENS = 64
"""On TPU more tokens than that, so those of prefill, meet their experts in ragged products."""

LAYOUTS: tuple[Layout, ...] = ("BKSD", "BSKD")


def cache_layout(platform: str) -> Layout:
    """Axis order of the KV cache that attention reads fastest on `platform` ("cpu", "gpu", "tpu").

    Head-major keeps a head's positions contiguous, which batched products on CPU and GPU want. On TPU,
    XLA would relayout such a cache at entry and exit of the decode loop, with temporaries as large as it.
    """
    return "BSKD" if platform == "tpu" else "BKSD"


def plain_step_tokens(platform: str, dtype: str, rows: int) -> int:
    """Tokens T that a step without drafts computes per row.

    One, except where the product of a single bfloat16 vector with a matrix misses XLA's fast path: on CPU
    it reads weights at a fifth of the rate of two vectors (docs/performance.md). In float32 the single
    vector is the fast one.
    """
    return 2 if platform == "cpu" and dtype == "bfloat16" and rows == 1 else 1


def takes_ragged_experts(platform: str, tokens: int) -> bool:
    """Whether `tokens` tokens meet their experts in `jax.lax.ragged_dot`, not in a loop over tiles.

    XLA has an instruction for it on TPU; elsewhere it is expanded into dense products, slower than tiles
    (scripts/bench_moe.py). A verify step is to read its active experts alone: the loop does, everywhere.
    """
    return platform == "tpu" and tokens > MOST_TILED_TOKENS
