"""How sure a figure is: bootstrap over documents, because tokens of one text are not independent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure and its confidence interval; low and high are NaN where there are fewer than two documents."""

    value: float
    low: float = math.nan
    high: float = math.nan


def ratio(
    numerators: Sequence[float], denominators: Sequence[float], documents: Sequence[str], *, seed: int = 0
) -> Interval:
    """sum(numerators) / sum(denominators), one entry a case; whole documents are drawn anew.

    NaN where the denominators sum to 0.
    """
    top, bottom = _per_document(documents, numerators, denominators)
    return _interval(_divide(top.sum(), bottom.sum()), _resampled(top, bottom, seed))


def paired_difference(
    numerators: Sequence[float],
    others: Sequence[float],
    denominators: Sequence[float],
    documents: Sequence[str],
    *,
    seed: int = 0,
) -> Interval:
    """The ratio of `numerators` less that of `others`, both of the same cases.

    What makes a document hard is in both and goes away: the interval is narrower than those of the two apart.
    """
    return ratio([a - b for a, b in zip(numerators, others, strict=True)], denominators, documents, seed=seed)


def _per_document(
    documents: Sequence[str], numerators: Sequence[float], denominators: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """float64[documents] each: sums over the cases of a document, in the order of names."""
    _, index = np.unique(np.array(documents), return_inverse=True)
    if not len(numerators) == len(denominators) == len(index):
        raise ValueError(
            f"{len(numerators)} numerators, {len(denominators)} denominators, {len(index)} cases"
        )
    return np.bincount(index, numerators), np.bincount(index, denominators)


def _resampled(top: np.ndarray, bottom: np.ndarray, seed: int) -> np.ndarray:
    """float64[RESAMPLES]: the ratio in as many draws of documents, with replacement."""
    count = len(top)
    if count < 2:
        return np.full(RESAMPLES, math.nan)
    # How often each document was drawn; the same draws for every setting over the same documents.
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return _divide(times @ top, times @ bottom)


def _divide(top, bottom):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bottom == 0, math.nan, np.divide(top, bottom))


def _interval(value: float, draws: np.ndarray) -> Interval:
    if np.isnan(draws).any():
        return Interval(float(value))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(float(value), float(low), float(high))
