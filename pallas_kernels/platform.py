"""What each platform gets: the cache's layout and the width of a plain step."""

from __future__ import annotations

from typing import Literal

Layout = Literal["BKSD", "BSKD"]
"""Axis order of one layer's K or V: B batch, K KV heads, S positions, D head_dim."""

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
