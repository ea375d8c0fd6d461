"""How many tokens to draft: a fixed K, or one that follows measured acceptance and measured cost.

The adaptive K asks what the last tokens would have cost with each of a few static sizes, and with plain steps
alone. Tokens that plain steps emitted count, too: the drafter goes on proposing there, for the trace, and
whether a proposal would have been right is known without verifying it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from sv_jax.engine.trace import RowTrace
from sv_jax.speculation.types import Drafter

SIZES = (3, 7, 15)
START = 7
WINDOW = 16  # tokens of each row that are looked back on: texts change, and a longer memory comes too late
SLICE_SECONDS = 0.25  # host work and streaming come that often
FIRST_STEPS, MOST_STEPS = 4, 64
MEMORY = 24  # slices from which costs are estimated
# Of a step with drafts over one without, and how it grows with the tokens verified: used until measured.
PRIOR_RATIO, PRIOR_EXPONENT = 2.0, 0.3
PRIOR_WEIGHT = 1.0  # in steps


@dataclasses.dataclass(frozen=True)
class SlicePlan:
    """How the next slice runs."""

    drafter: Drafter
    max_drafted: int  # 0: plain steps, with the same program
    max_steps: int


@dataclasses.dataclass(frozen=True)
class SliceReport:
    """How a slice went."""

    bucket: int
    first_step: int
    steps: int
    seconds: float  # without compilation
    compile_seconds: float
    traces: Sequence[RowTrace]  # of all rows, whole; empty if nobody wants them

    @property
    def wide_steps(self) -> int:
        """Steps of the slice in which some row's drafts were verified."""
        wide: set[int] = set()
        for trace in self.traces:
            steps = trace.step[trace.drafted > 0]
            wide.update(steps[steps >= self.first_step].tolist())
        return len(wide)


class SpeculationLength(Protocol):
    """Decides slice by slice."""

    @property
    def most(self) -> int:
        """The largest K that it may choose."""

    @property
    def wants_traces(self) -> bool:
        """Whether `SliceReport.traces` is read."""

    def plan(self, bucket: int) -> SlicePlan: ...

    def observe(self, report: SliceReport) -> None: ...


class FixedLength:
    """One drafter throughout; slices last about SLICE_SECONDS."""

    wants_traces = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.most = drafter.num_speculative_tokens
        self._steps = FIRST_STEPS

    def plan(self, bucket: int) -> SlicePlan:
        return SlicePlan(self.drafter, self.most, self._steps)

    def observe(self, report: SliceReport) -> None:
        self._steps = _next_steps(report)


def _next_steps(report: SliceReport) -> int:
    """Steps of a slice that lasts about SLICE_SECONDS."""
    if not report.steps or report.seconds <= 0:
        return FIRST_STEPS
    return int(np.clip(SLICE_SECONDS * report.steps / report.seconds, 1, MOST_STEPS))


class AdaptiveLength:
    """K among SIZES, or plain steps, whichever would have made the last tokens fastest.

    A size whose program does not exist yet is chosen when what it would have saved so far exceeds what a
    compilation takes: time lost either way is at most about twice the least.

    make_drafter: K -> Drafter. Costs are kept for as long as the object lives, by cache bucket.
    """

    wants_traces = True

    def __init__(self, make_drafter: Callable[[int], Drafter]) -> None:
        self.most = max(SIZES)
        self._drafters = {k: make_drafter(k) for k in SIZES}
        self._program = START  # the size whose program runs
        self._speculate = True
        self._steps = FIRST_STEPS
        self._costs: dict[int, StepCosts] = {}  # by bucket
        self._met: set[tuple[int, int]] = set()  # (bucket, K) whose programs exist
        self._missed: dict[tuple[int, int], float] = {}  # seconds that others would have saved
        self._compile_seconds = 0.0  # what a new program took

    def restart(self) -> None:
        """Other texts come: starts from START again, with the costs that are known."""
        self._program, self._speculate, self._steps = START, True, FIRST_STEPS

    def plan(self, bucket: int) -> SlicePlan:
        drafter = self._drafters[self._program]
        return SlicePlan(drafter, self._program if self._speculate else 0, self._steps)

    def observe(self, report: SliceReport) -> None:
        self._steps = _next_steps(report)
        bucket, wide = report.bucket, report.wide_steps
        costs = self._costs.setdefault(bucket, StepCosts())
        self._met.add((bucket, self._program))
        if report.compile_seconds > 0:  # the first run of a program is no measure of the later ones
            self._compile_seconds = report.compile_seconds
        else:
            costs.add(self._program, wide, report.steps - wide, report.seconds)
        # Rows that have ended, too: their last tokens are as good a guess as any.
        outlooks = [outlook(trace) for trace in report.traces if len(trace.step) > 1]
        if outlooks:
            self._choose(bucket, seconds_per_token(outlooks, costs.estimate()), report)

    def _choose(self, bucket: int, times: dict[int, float], report: SliceReport) -> None:
        current = self._program if self._speculate else 0
        tokens = sum(int((trace.step >= report.first_step).sum()) for trace in report.traces)
        for k in SIZES:
            saved = (times[current] - times[k]) * tokens
            self._missed[bucket, k] = max(0.0, self._missed.get((bucket, k), 0.0) + saved)
        possible = [k for k in times if k in (0, current) or self._pays(bucket, k)]
        best = min(possible, key=times.__getitem__)
        self._speculate, self._program = best > 0, best or self._program

    def _pays(self, bucket: int, k: int) -> bool:
        return (bucket, k) in self._met or self._missed[bucket, k] > self._compile_seconds


class StepCosts:
    """Seconds of a plain step and of a step with K drafts, from slices that mix them: least squares.

    What was not measured follows from what was, by the prior's proportions.
    """

    def __init__(self) -> None:
        self._slices: collections.deque[tuple[int, int, int, float]] = collections.deque(maxlen=MEMORY)

    def add(self, k: int, wide_steps: int, plain_steps: int, seconds: float) -> None:
        if wide_steps + plain_steps:
            self._slices.append((k, wide_steps, plain_steps, seconds))

    def estimate(self) -> dict[int, float]:
        """K -> seconds of a step, 0 being a plain one; the prior's proportions if nothing was measured."""
        columns = (0, *SIZES)
        prior = {k: PRIOR_RATIO * ((k + 1) / (START + 1)) ** PRIOR_EXPONENT if k else 1.0 for k in columns}
        rows: list[list[float]] = []
        seconds: list[float] = []
        for k, wide, plain, measured in self._slices:
            rows.append([plain * (c == 0) + wide * (c == k) for c in columns])
            seconds.append(measured)
        if not rows:
            return prior
        for k in (0, *SIZES):  # each size against START
            if k != START:
                weight = PRIOR_WEIGHT / prior[k]
                rows.append([weight * (c == k) - PRIOR_WEIGHT / prior[START] * (c == START) for c in columns])
                seconds.append(0.0)
        solution = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)[0]
        floor = 0.1 * float(np.max(solution))
        return {k: max(float(x), floor) for k, x in zip(columns, solution)}


def seconds_per_token(outlooks: Sequence[Outlook], costs: Mapping[int, float]) -> dict[int, float]:
    """K -> seconds that one of the last tokens would have taken, 0 meaning plain steps alone."""
    times = {}
    for k, cost in costs.items():
        tokens, wide, plain = replay(outlooks, k)
        times[k] = (wide * cost + plain * costs[0]) / max(tokens, 1)
    return times


@dataclasses.dataclass(frozen=True)
class Outlook:
    """Of a row's last tokens: whether there was a draft for them, and whether it was right. bool[n] each."""

    drafted: np.ndarray
    right: np.ndarray


def outlook(trace: RowTrace) -> Outlook:
    """What a trace says of drafts that begin at each of the last WINDOW tokens."""
    last = slice(max(0, len(trace.step) - WINDOW), None)
    step, drafted, right = trace.step[last], trace.drafted[last], trace.foreseen[last].copy()
    ends = np.append(step[1:] != step[:-1], True)  # the last token of each step: bonus or recovered
    starts = np.append(True, ends[:-1])
    emitted_drafts = np.arange(len(step)) - np.maximum.accumulate(np.where(starts, np.arange(len(step)), 0))
    # After a draft that was right to its end, a longer one would have gone on for as long as the next is.
    open_ended = ends & (drafted > 0) & (emitted_drafts == drafted)
    for i in np.flatnonzero(open_ended)[::-1]:
        right[i] = right[i + 1] if i + 1 < len(right) else True
    return Outlook((trace.proposed[last] > 0) | right, right)


def replay(outlooks: Sequence[Outlook], k: int) -> tuple[int, int, int]:
    """(tokens, wide steps, plain steps) that the last tokens would have taken with K = k, rows in step."""
    if k == 0:
        count = min(len(row.right) for row in outlooks)
        return count * len(outlooks), 0, count
    at = [0] * len(outlooks)
    tokens = wide = plain = 0
    while all(place < len(row.right) for place, row in zip(at, outlooks)):
        drafts = [bool(row.drafted[place]) for place, row in zip(at, outlooks)]
        for i, row in enumerate(outlooks):
            run = row.right[at[i] : at[i] + k] if drafts[i] else row.right[:0]
            emitted = 1 + int(np.argmin(np.append(run, False)))
            at[i] += emitted
            tokens += emitted
        wide, plain = wide + any(drafts), plain + (not any(drafts))
    return tokens, wide, plain
