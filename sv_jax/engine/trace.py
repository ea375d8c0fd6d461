"""What a row's trace says: how its steps went. Only tokens that were kept are in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.config import ModelConfig
from sv_jax.model.ffn import ChannelReads
from sv_jax.model.moe import ExpertReads
from sv_jax.sparsity.plan import AttentionPlan
from sv_jax.sparsity.reads import kv_bytes, summary_bytes
from sv_jax.speculation.types import Trace


@dataclasses.dataclass(frozen=True)
class RowTrace:
    """speculation.Trace of one row's output tokens, the prefill's first; arrays [n]."""

    step: np.ndarray
    drafted: np.ndarray
    proposed: np.ndarray
    foreseen: np.ndarray
    kv_blocks: np.ndarray
    experts: ExpertReads | None = None
    channels: ChannelReads | None = None

    @classmethod
    def read(cls, trace: Trace) -> RowTrace:
        """Host copies of a whole batch's trace, [B, N] each."""
        return cls(*jax.device_get([getattr(trace, field.name) for field in dataclasses.fields(cls)]))

    def __getitem__(self, index: Any) -> RowTrace:
        """The same part of every array."""
        parts = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return RowTrace(*jax.tree.map(lambda x: x[index], parts))

    def cut(self, count: int) -> RowTrace:
        """The first `count` tokens."""
        return self[:count]


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """Counts over the rows of a batch. The token that a prefill emits is not a step's."""

    histogram: np.ndarray  # int[K + 2], index i: row-steps that emitted i tokens
    drafted: int
    accepted: int
    steps_with_draft: int  # row-steps
    steps: int  # target passes
    plain_steps: int  # those that no row had a draft for


def count_steps(rows: Sequence[RowTrace], most_emitted: int) -> StepCounts:
    """Counts of a batch's rows. most_emitted: tokens that one step can emit, K + 1."""
    histogram = np.zeros(most_emitted + 1, np.int64)
    drafted = accepted = steps_with_draft = last_step = 0
    wide: set[int] = set()
    for row in rows:
        steps, firsts, emitted = np.unique(row.step[row.step > 0], return_index=True, return_counts=True)
        np.add.at(histogram, emitted, 1)
        drafts = row.drafted[row.step > 0]
        row_drafted = drafts[firsts]
        drafted += int(row_drafted.sum())
        steps_with_draft += int((row_drafted > 0).sum())
        accepted += int((row.foreseen[row.step > 0] & (drafts > 0)).sum())
        wide.update(steps[row_drafted > 0].tolist())
        last_step = max(last_step, *steps.tolist(), 0)
    return StepCounts(histogram, drafted, accepted, steps_with_draft, last_step, last_step - len(wide))


@dataclasses.dataclass(frozen=True)
class ReadCounts:
    """What verification read of the cache, over row-steps; blocks are summed over layers and KV heads."""

    tokens: int  # that these steps emitted
    row_steps: int
    sparse_row_steps: int  # those that read fewer blocks than the row had
    kv_blocks: int
    dense_kv_blocks: int  # that the rows had
    kv_bytes: int  # K and V, in whole blocks where a step was not dense
    summary_bytes: int  # of blocks, for their scores
    dense_bytes: int  # K and V of the committed positions

    def __add__(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))


def count_reads(
    rows: Sequence[RowTrace],
    prompt_lengths: Sequence[int],
    plan: AttentionPlan,
    model: ModelConfig,
    dtype: str,
) -> ReadCounts:
    """Reads of a batch's rows that verified by `plan`.

    A step with no KV blocks in its trace ran in the dense program: it read every position, and no summary.

    Args:
      prompt_lengths: tokens before each row's first output token.
      dtype: of the cache.
    """
    lengths, blocks, tokens = (np.concatenate(parts) for parts in zip(*map(_row_reads, rows, prompt_lengths)))
    held = -(-lengths // plan.block_size)
    heads, position_bytes = model.num_kv_heads, kv_bytes(model, jnp.dtype(dtype).itemsize)
    whole, positions = np.zeros_like(lengths), np.zeros_like(lengths)
    for layer, anchor in enumerate(plan.anchor_of):
        window = model.sliding_window(layer)
        # The root, at position L, sees the window - 1 positions before it. Blocks before those are none that
        # a selection could have had; a layer that reads everything reads them, too.
        seen = lengths if window is None else np.minimum(lengths, window - 1)
        positions += heads * seen
        whole += heads * (held if anchor is None else held - (lengths - seen) // plan.block_size)
    dense = blocks == 0
    dense_bytes = positions * position_bytes
    return ReadCounts(
        tokens=int(tokens.sum()),
        row_steps=len(lengths),
        sparse_row_steps=int((~dense & (blocks < whole)).sum()),
        kv_blocks=int(np.where(dense, whole, blocks).sum()),
        dense_kv_blocks=int(whole.sum()),
        kv_bytes=int(np.where(dense, dense_bytes, blocks * plan.block_size * position_bytes).sum()),
        summary_bytes=int(np.where(dense, 0, summary_bytes(plan, model, lengths)).sum()),
        dense_bytes=int(dense_bytes.sum()),
    )


def _row_reads(row: RowTrace, prompt_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each step: committed tokens before it, KV blocks read, tokens that it emitted; int64[steps]."""
    steps, firsts, emitted = np.unique(row.step, return_index=True, return_counts=True)
    by_step = steps > 0  # the prefill's token has no step
    # A step's first token lies behind the root, which was not committed yet.
    committed = prompt_length + firsts[by_step] - 1
    return committed, row.kv_blocks[firsts[by_step]].astype(np.int64), emitted[by_step]
