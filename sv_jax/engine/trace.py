"""What a row's trace says: how its steps went. Only tokens that were kept are in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class RowTrace:
    """speculation.Trace of one row's output tokens, the prefill's first; arrays [n]."""

    step: np.ndarray
    drafted: np.ndarray
    proposed: np.ndarray
    foreseen: np.ndarray

    def cut(self, count: int) -> RowTrace:
        return RowTrace(*(getattr(self, field.name)[:count] for field in dataclasses.fields(self)))


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
