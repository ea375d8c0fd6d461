"""What the measurements say: a row for each kind, context and setting; differences from a plain window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sv_jax.evaluation.statistics import Interval, paired_difference, ratio

if TYPE_CHECKING:  # importing it imports JAX; a report needs none
    from sv_jax.evaluation.drift import DriftSetting, Measurement
    from sv_jax.evaluation.free_running import FreeRun

BASELINE = "recent"  # what a selector has to beat at the same bytes


@dataclasses.dataclass(frozen=True)
class DriftRow:
    """One setting over all cases of a kind and context."""

    kind: str
    context: int
    setting: DriftSetting
    cases: int
    documents: int
    positions: int
    agreement: Interval  # share of positions with the same most likely token
    kl: Interval  # nats a position
    agreeing_prefix: Interval  # positions a case before the first disagreement
    kv_bytes: float  # a step and row
    dense_kv_bytes: float
    found: Interval | None  # share of needles; None: no needles
    dense_found: float | None

    @property
    def share(self) -> float:
        return self.kv_bytes / self.dense_kv_bytes


@dataclasses.dataclass(frozen=True)
class Difference:
    """A selector less the plain window of the same budget, over the same cases."""

    kind: str
    context: int
    setting: DriftSetting
    agreement: Interval
    kl: Interval


@dataclasses.dataclass(frozen=True)
class FreeRow:
    """One setting's generated texts, over all cases of a kind and context."""

    kind: str
    context: int
    setting: DriftSetting
    cases: int
    tokens: int  # generated a case
    same_tokens: Interval  # before the first difference, a case
    identical: int  # cases
    acceptance: Interval  # tokens a step
    dense_acceptance: Interval
    share: float | None  # of dense verification's bytes a token


def drift_rows(measurements: Iterable[Measurement]) -> list[DriftRow]:
    """Rows in the order in which kinds, contexts and settings first come."""
    return [_drift_row(group) for group in _groups(measurements).values()]


def _groups(results: Iterable[Any]) -> dict[tuple[Any, ...], list[Any]]:
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for result in results:
        groups.setdefault((result.kind, result.context, result.setting), []).append(result)
    return groups


def _drift_row(group: Sequence[Measurement]) -> DriftRow:
    first, documents = group[0], [m.document for m in group]
    positions, ones = [m.positions for m in group], [1.0] * len(group)
    needles = first.found is not None
    return DriftRow(
        kind=first.kind,
        context=first.context,
        setting=first.setting,
        cases=len(group),
        documents=len(set(documents)),
        positions=sum(positions),
        agreement=ratio([m.agreeing for m in group], positions, documents),
        kl=ratio([m.kl for m in group], positions, documents),
        agreeing_prefix=ratio([m.agreeing_prefix for m in group], ones, documents),
        kv_bytes=sum(m.kv_bytes for m in group) / len(group),
        dense_kv_bytes=sum(m.dense_kv_bytes for m in group) / len(group),
        found=ratio([float(bool(m.found)) for m in group], ones, documents) if needles else None,
        dense_found=sum(bool(m.dense_found) for m in group) / len(group) if needles else None,
    )


def differences(measurements: Iterable[Measurement], *, baseline: str = BASELINE) -> list[Difference]:
    """Each setting less the one that differs in its selector alone, over the cases that both have."""
    groups = _groups(measurements)
    found = []
    for (kind, context, setting), group in groups.items():
        other = dataclasses.replace(setting, selector=baseline)
        theirs = {m.case: m for m in groups.get((kind, context, other), ())}
        pairs = [(m, theirs[m.case]) for m in group if m.case in theirs]
        if setting.selector == baseline or not pairs:
            continue
        agreement, kl = (_paired(pairs, value) for value in (lambda m: m.agreeing, lambda m: m.kl))
        found.append(Difference(kind, context, setting, agreement, kl))
    return found


def _paired(
    pairs: Sequence[tuple[Measurement, Measurement]], value: Callable[[Measurement], float]
) -> Interval:
    return paired_difference(
        [value(m) for m, _ in pairs],
        [value(other) for _, other in pairs],
        [m.positions for m, _ in pairs],
        [m.document for m, _ in pairs],
    )


def free_rows(runs: Iterable[FreeRun]) -> list[FreeRow]:
    return [_free_row(group) for group in _groups(runs).values()]


def _free_row(group: Sequence[FreeRun]) -> FreeRow:
    first, documents = group[0], [run.document for run in group]
    stepped = [run.tokens - 1 for run in group]  # the first token is the prefill's
    read = [(run.bytes_per_token, run.dense_bytes_per_token) for run in group]
    known = [(sparse, dense) for sparse, dense in read if sparse is not None and dense is not None]
    return FreeRow(
        kind=first.kind,
        context=first.context,
        setting=first.setting,
        cases=len(group),
        tokens=max(run.tokens for run in group),
        same_tokens=ratio([run.same_tokens for run in group], [1.0] * len(group), documents),
        identical=sum(run.identical for run in group),
        acceptance=ratio(stepped, [run.steps for run in group], documents),
        dense_acceptance=ratio(stepped, [run.dense_steps for run in group], documents),
        share=sum(s for s, _ in known) / sum(d for _, d in known) if known else None,
    )


def as_document(value: Any) -> Any:
    """Rows as plain JSON values; of an interval [value, low, high]."""
    if isinstance(value, Interval):
        return [value.value, value.low, value.high]
    if dataclasses.is_dataclass(value):
        return {field.name: as_document(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [as_document(item) for item in value]
    return value
