"""compare_with_plain finds what differs, and says how far the logits were apart there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sv_jax.engine.lossless import NEAR_TIE, Divergence, LosslessReport, compare_outputs, first_difference
from sv_jax.engine.results import RequestOutput
from tests.engine.tiny_directory import random_prompts, reference_logits

PROMPTS = random_prompts(9, 30, 3, 50)


def altered(result, row, token_ids):
    outputs = list(result.outputs)
    outputs[row] = dataclasses.replace(outputs[row], token_ids=token_ids)
    return dataclasses.replace(result, outputs=outputs)


@pytest.fixture(scope="module")
def result(model):
    return model.generate(PROMPTS, num_speculative_tokens=4, max_new_tokens=12)


def gap_after(tokens):
    second, first = np.sort(reference_logits(tokens)[-1])[-2:]
    return first - second


def test_equal_runs(model, result):
    report = model.compare_with_plain(result, PROMPTS)
    assert report == LosslessReport(4, [])
    assert report.lossless and report.identical_rows == 4 and not report.interrupted


@pytest.mark.parametrize("index", [0, 5, 11])
def test_a_planted_token_is_found(model, result, index):
    ids = list(result.outputs[2].token_ids)
    right = ids[index]
    ids[index] = (right + 1) % 64
    report = model.compare_with_plain(altered(result, 2, ids), PROMPTS)
    (divergence,) = report.divergences
    gap = gap_after([*PROMPTS[2], *ids[:index]])
    assert divergence == Divergence(2, index, ids[index], right, pytest.approx(gap, abs=1e-3))
    assert report.identical_rows == 3
    assert divergence.top2_gap > NEAR_TIE and not report.lossless


def test_a_missing_tail_is_found(model, result):
    ids = result.outputs[0].token_ids
    report = model.compare_with_plain(altered(result, 0, ids[:7]), PROMPTS)
    (divergence,) = report.divergences
    assert (divergence.index, divergence.speculative_token, divergence.plain_token) == (7, None, ids[7])


def test_a_surplus_token_is_found(model, result):
    ids = [*result.outputs[3].token_ids, 5]
    report = model.compare_with_plain(altered(result, 3, ids), PROMPTS)
    (divergence,) = report.divergences
    assert (divergence.row, divergence.index) == (3, 12)
    assert (divergence.speculative_token, divergence.plain_token) == (5, None)


def test_an_interrupted_comparison_covers_what_there_is(model, result):
    report = model.compare_with_plain(result, PROMPTS, should_stop=lambda: True)
    assert report.interrupted and report.lossless and report.identical_rows == 4


def output(ids, reason="length"):
    return RequestOutput(1, ids, "", reason)


def test_near_ties_are_lossless():
    speculative, plain = [output([1, 2]), output([3])], [output([1, 4]), output([3])]
    for gap, lossless in ((NEAR_TIE / 2, True), (NEAR_TIE * 2, False)):
        report = compare_outputs(speculative, plain, [[7], [8]], lambda ids, gap=gap: gap)
        assert report.divergences == [Divergence(0, 1, 2, 4, gap)] and report.lossless is lossless


def test_the_gap_is_asked_after_the_common_tokens():
    asked = []
    compare_outputs([output([1, 2, 3])], [output([1, 2, 9])], [[7, 8]], lambda ids: asked.append(ids) or 0.0)
    assert asked == [[7, 8, 1, 2]]


def test_interrupted_rows_are_compared_as_far_as_they_got():
    cut = [output([1, 2], "interrupted")]
    report = compare_outputs(cut, [output([1, 2, 3])], [[7]], lambda ids: 1.0)
    assert report.interrupted and report.identical_rows == 1
    wrong = compare_outputs(cut, [output([1, 5, 3])], [[7]], lambda ids: 1.0)
    assert wrong.divergences == [Divergence(0, 1, 2, 5, 1.0)] and not wrong.lossless


@pytest.mark.parametrize(
    "left, right, index",
    [([], [], None), ([1], [1], None), ([], [1], 0), ([1, 2], [1], 1), ([1, 2], [1, 3], 1), ([2], [1, 3], 0)],
)
def test_first_difference(left, right, index):
    assert first_difference(left, right) == index
