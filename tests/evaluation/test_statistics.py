"""Intervals: the law they promise, documents as units, pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sv_jax.evaluation.statistics import Interval, paired_difference, ratio


def test_a_ratio_of_sums_is_not_a_mean_of_ratios():
    found = ratio([1, 30], [2, 30], ["a", "b"])
    assert found.value == pytest.approx(31 / 32)
    assert 0.5 <= found.low < found.value < found.high == 1.0


def test_the_interval_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        lengths = generator.integers(50, 150, size=30)
        rates = np.clip(generator.normal(0.8, 0.1, size=30), 0, 1)
        agreeing = generator.binomial(lengths, rates)
        names = [f"d{i}" for i in range(30)]
        found = ratio(agreeing.tolist(), lengths.tolist(), names, seed=trial)
        covered += found.low <= 0.8 <= found.high
    assert 0.88 <= covered / 200 <= 0.98  # 0.95 promised; the percentile bootstrap is a little narrow


def test_cases_of_one_document_are_not_independent():
    outcomes = [0.0, 1.0] * 3
    apart = ratio([x for x in outcomes for _ in range(10)], [1.0] * 60, [f"d{i}" for i in range(60)])
    together = ratio([x for x in outcomes for _ in range(10)], [1.0] * 60, [f"d{i // 10}" for i in range(60)])
    assert apart.value == together.value == 0.5
    assert together.high - together.low > 2 * (apart.high - apart.low)


def test_the_order_of_cases_does_not_matter():
    generator = np.random.default_rng(2)
    names = [f"d{i}" for i in range(20)] * 2
    top, bottom = generator.integers(0, 9, 40).tolist(), generator.integers(9, 20, 40).tolist()
    order = generator.permutation(40)
    assert ratio(top, bottom, names) == ratio(*([x[i] for i in order] for x in (top, bottom, names)))
    assert ratio(top, bottom, names, seed=1) != ratio(top, bottom, names)


def test_a_paired_difference_is_sharper_than_two_intervals():
    generator = np.random.default_rng(1)
    easy = generator.uniform(0.2, 0.9, size=40)
    first, second, names = (100 * easy).tolist(), (100 * easy - 3).tolist(), [f"d{i}" for i in range(40)]
    found = paired_difference(first, second, [100] * 40, names)
    assert found == Interval(*(pytest.approx(0.03, abs=1e-9),) * 3)
    alone = ratio(first, [100] * 40, names)
    assert alone.high - alone.low > 0.05
    with pytest.raises(ValueError):
        paired_difference(first, second[1:], [100] * 40, names)


def test_what_cannot_be_known_is_nan():
    one = ratio([3, 1], [4, 4], ["a", "a"])
    assert one.value == 0.5 and math.isnan(one.low) and math.isnan(one.high)
    assert math.isnan(ratio([0, 0], [0, 0], ["a", "b"]).value)
    sometimes = ratio([0, 2], [0, 2], ["a", "b"])  # a draw without b has no value
    assert sometimes.value == 1 and math.isnan(sometimes.low)
    with pytest.raises(ValueError, match="1 numerators, 2 denominators"):
        ratio([1], [1, 2], ["a", "b"])
