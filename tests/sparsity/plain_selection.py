"""Selection of blocks in numpy and loops, by the definitions of arXiv 2512.21911 and of our choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from sv_jax.sparsity.summaries import KEYS_PER_MEAN


def plain_tokens(length: int, l0: int, rho: str | Fraction) -> int:
    """Tokens that a KV head reads of `length` committed ones, in exact arithmetic."""
    if length <= l0:
        return length
    return math.floor((length - l0) * Fraction(rho) + l0)


def plain_blocks(tokens: int, block_size: int) -> int:
    return math.ceil(Fraction(tokens, block_size))


REDUCE = {"mean": np.mean, "low": np.min, "high": np.max}


def plain_summary(name: str, keys: np.ndarray, length: int, block_size: int) -> np.ndarray:
    """A statistic over each block's committed keys; 0 for blocks without any. [K, S, D] -> [K, M, D].

    fine_means are the means of blocks of KEYS_PER_MEAN keys.
    """
    heads, capacity, dim = keys.shape
    if name == "fine_means":
        return plain_summary("mean", keys, length, KEYS_PER_MEAN)
    summary = np.zeros((heads, capacity // block_size, dim))
    for start in range(0, length, block_size):
        summary[:, start // block_size] = REDUCE[name](
            keys[:, start : min(start + block_size, length)].astype(np.float64), axis=1
        )
    return summary


def plain_mean_score(queries: np.ndarray, keys: np.ndarray) -> float:
    """s = (1 / B) sum over keys of q . k, for each of the G root queries [G, D]; then the groups' average."""
    scores = [sum(float(q @ k) for k in keys) / len(keys) for q in queries]
    return sum(scores) / len(scores)


def plain_bound_score(queries: np.ndarray, keys: np.ndarray) -> float:
    """Quest: sum over channels of the largest q_i * k_i that keys within the block's extremes could have."""
    low, high = keys.min(0), keys.max(0)
    scores = [sum(max(q[i] * low[i], q[i] * high[i]) for i in range(len(q))) for q in queries]
    return sum(scores) / len(scores)


PLAIN_SCORES = {"mean": plain_mean_score, "bound": plain_bound_score}


def plain_choice(
    scores: Sequence[float], first: int, held: int, budget: int, *, sink_blocks: int, local_blocks: int
) -> list[int]:
    """Blocks that are read of first .. held - 1: sinks, local ones, then the best; of equals the earlier."""
    readable = range(first, held)
    forced = [n for n in readable if n < first + sink_blocks or n >= held - local_blocks]
    others = sorted((n for n in readable if n not in forced), key=lambda n: (-scores[n], n))
    return sorted(forced + others[: max(0, budget - len(forced))])


def plain_selection(
    score: str,
    queries: np.ndarray,
    keys: np.ndarray,
    length: int,
    *,
    l0: int,
    rho: str | Fraction,
    block_size: int,
    sink_blocks: int,
    local_blocks: int,
    window: int | None = None,
) -> list[list[int]]:
    """Per KV head the blocks that a step reads. queries [H, D]: the root's. keys: a row's [K, S, D]."""
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    group = len(queries) // len(keys)
    held = plain_blocks(length, block_size)
    # The root is at position `length` and sees itself and window - 1 positions before it.
    oldest = 0 if window is None else max(0, length - (window - 1))
    selection = []
    for head, head_keys in enumerate(keys):
        own = queries[head * group : (head + 1) * group]
        blocks = [head_keys[n * block_size : min((n + 1) * block_size, length)] for n in range(held)]
        selection.append(
            plain_choice(
                [PLAIN_SCORES[score](own, block) for block in blocks],
                min(oldest // block_size, held),
                held,
                plain_blocks(plain_tokens(length, l0, rho), block_size),
                sink_blocks=sink_blocks,
                local_blocks=local_blocks,
            )
        )
    return selection
