"""How many tokens to draft: a fixed K, or one that follows measured acceptance and measured cost.

The adaptive K asks what the last tokens would have cost with each of a few static sizes, and with plain steps
alone. Tokens that plain steps emitted count, too: the drafter goes on proposing there, for the trace, and
whether a proposal would have been right is known without verifying it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from sv_jax.engine.trace import RowTrace
from sv_jax.speculation.types import Drafter

SIZES = (3, 7, 15)
START = 7
WINDOW = 64  # tokens of each row that are looked back on
SLICE_SECONDS = 0.25  # host work and streaming come that often
FIRST_STEPS, MOST_STEPS = 4, 64
HYSTERESIS = 0.95  # another size must promise to need less than this share of the time
NEW_WEIGHT = 0.5  # of the newest measurement of a cost
# Of a step with drafts over one without, and how it grows with the tokens verified: used until measured.
PRIOR_RATIO, PRIOR_EXPONENT = 2.0, 0.3


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
    remaining_tokens: int  # of the row that may go on longest

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

    make_drafter: K -> Drafter. Costs are kept for as long as the object lives, by cache bucket.
    """

    wants_traces = True

    def __init__(self, make_drafter: Callable[[int], Drafter]) -> None:
        self.most = max(SIZES)
        self._drafters = {k: make_drafter(k) for k in SIZES}
        self._program = START  # the size whose program runs
        self._speculate = True
        self._steps = FIRST_STEPS
        self._costs: dict[tuple[int, int], float] = {}  # (bucket, K) -> seconds a step; K = 0: plain
        self._met: set[tuple[int, int]] = set()  # (bucket, K) whose programs exist
        self._compile_seconds = 0.0  # what a new program took

    def restart(self) -> None:
        """Other texts come: starts from START again, with the costs that are known."""
        self._program, self._speculate, self._steps = START, True, FIRST_STEPS

    def plan(self, bucket: int) -> SlicePlan:
        drafter = self._drafters[self._program]
        return SlicePlan(drafter, self._program if self._speculate else 0, self._steps)

    def observe(self, report: SliceReport) -> None:
        self._measure(report)
        self._steps = _next_steps(report)
        # Rows that have ended, too: their last tokens are as good a guess as any.
        outlooks = [outlook(trace) for trace in report.traces if len(trace.step) > 1]
        if not outlooks:
            return
        current = self._program if self._speculate else 0
        times = {k: self._seconds_per_token(outlooks, report.bucket, k) for k in (0, *SIZES)}
        worth = [k for k in times if k == current or self._pays(times, current, k, report)]
        best = min(worth, key=times.__getitem__)
        if times[best] < HYSTERESIS * times[current]:
            self._speculate = best > 0
            self._program = best or self._program

    def _measure(self, report: SliceReport) -> None:
        if report.compile_seconds > 0:
            self._compile_seconds = report.compile_seconds
        self._met.add((report.bucket, self._program))
        plain, wide = (report.bucket, 0), (report.bucket, self._program)
        wide_steps = report.wide_steps
        plain_steps = report.steps - wide_steps
        if not wide_steps:
            if plain_steps:
                self._update(plain, report.seconds / plain_steps)
            return
        ratio = self._cost(*wide) / self._cost(*plain)
        unit = report.seconds / (plain_steps + ratio * wide_steps)
        known_plain = self._costs.get(plain, unit)
        rest = report.seconds - known_plain * plain_steps
        self._update(wide, max(rest / wide_steps, known_plain / 2))
        if plain_steps:
            self._update(plain, unit)

    def _update(self, key: tuple[int, int], seconds: float) -> None:
        old = self._costs.get(key, seconds)
        self._costs[key] = old + NEW_WEIGHT * (seconds - old)

    def _cost(self, bucket: int, k: int) -> float:
        """Seconds of a step, in proportion to each other where nothing was measured yet."""
        if (bucket, k) in self._costs:
            return self._costs[bucket, k]
        measured = [(other, c) for (b, other), c in self._costs.items() if b == bucket]

        def shape(k: int) -> float:
            return PRIOR_RATIO * ((k + 1) / (START + 1)) ** PRIOR_EXPONENT if k else 1.0

        if not measured:
            return shape(k)
        nearest, cost = min(measured, key=lambda pair: abs(pair[0] - k))
        return cost * shape(k) / shape(nearest)

    def _seconds_per_token(self, outlooks: Sequence[Outlook], bucket: int, k: int) -> float:
        tokens, wide, plain = replay(outlooks, k)
        return (wide * self._cost(bucket, k) + plain * self._cost(bucket, 0)) / max(tokens, 1)

    def _pays(self, times: dict[int, float], current: int, k: int, report: SliceReport) -> bool:
        """Whether what a size would save exceeds the compilation that it may need first."""
        if k == 0 or (report.bucket, k) in self._met:
            return True
        saved = (times[current] - times[k]) * report.remaining_tokens
        return saved > self._compile_seconds


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
