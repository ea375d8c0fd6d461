"""What is measured, what is kept, and what a second run leaves out; the measuring itself is made up."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from sv_jax.evaluation import drift_run
from sv_jax.evaluation.cutting import Case
from sv_jax.evaluation.drift_report import make_report
from sv_jax.evaluation.drift_run import DriftRun, checkpoint_hash
from sv_jax.evaluation.free_running import FreeRun, runnable
from sv_jax.evaluation.store import Store
from tests.evaluation.measurements import measurement, setting

CASES = [Case(f"copy/{name}/96", "copy", name, (1, 2, ord(name)), 1) for name in "abcde"]
SETTINGS = [setting("mean"), setting("random")]


@pytest.fixture
def calls(monkeypatch):
    """The names of the cases and the selectors of every call of `measure`."""
    made = []

    def measure(model, cases, settings, *, num_speculative_tokens, seed):
        made.append(("".join(case.document for case in cases), [s.selector for s in settings]))
        for each in settings:
            yield [measurement(case.name, each, agreeing=ord(case.document) % 10) for case in cases]

    monkeypatch.setattr(drift_run, "measure", measure)
    return made


def make_run(path, **changes):
    checkpoint = SimpleNamespace(sha256="0123456789abcdef" * 4, directory=None)
    model = SimpleNamespace(checkpoint=checkpoint, dtype="float32", provenance="tiny, made up")
    values = {"num_speculative_tokens": 7, "seed": 0, "batch_size": 2, **changes}
    return DriftRun(model, Store(path / "results.jsonl"), **values)


def test_batches_are_full_and_results_are_those_of_the_cases(tmp_path, calls):
    run, added = make_run(tmp_path), []
    assert run.missing(CASES, SETTINGS) == 10
    run.measure_missing(CASES, SETTINGS, on_results=added.append)
    both = ["mean", "random"]
    assert calls == [("ab", both), ("cd", both), ("ee", both)]  # no program for a batch of one
    assert added == [2, 2, 2, 2, 1, 1] and run.missing(CASES, SETTINGS) == 0
    for each in SETTINGS:
        assert run.measured(CASES[4], each) == measurement("copy/e/96", each, agreeing=ord("e") % 10)


def test_what_is_there_is_not_measured_again(tmp_path, calls):
    make_run(tmp_path).measure_missing(CASES[:3], SETTINGS[:1], on_results=id)
    calls.clear()
    added = []
    run = make_run(tmp_path)
    run.measure_missing(CASES, SETTINGS, on_results=added.append)
    assert calls == [("ab", ["random"]), ("cd", ["mean", "random"]), ("ee", ["mean", "random"])]
    assert sum(added) == 7 and len(run.store) == 10
    make_run(tmp_path).measure_missing(CASES, SETTINGS, on_results=added.append)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"num_speculative_tokens": 3},
        {"model": "dtype"},
        {"model": "weights"},
        {"version": drift_run.MEASURING_VERSION + 1},
        {"tokens": 9},
    ],
)
def test_other_circumstances_have_other_results(tmp_path, calls, monkeypatch, change):
    make_run(tmp_path).measure_missing(CASES, SETTINGS, on_results=id)
    run, cases = make_run(tmp_path, **{k: v for k, v in change.items() if k.startswith("num")}), CASES
    if change.get("model") == "dtype":
        run.model.dtype = "bfloat16"
    if change.get("model") == "weights":
        run.model.checkpoint.sha256 = "f" * 64
    if "version" in change:
        monkeypatch.setattr(drift_run, "MEASURING_VERSION", change["version"])
    if "tokens" in change:
        cases = [dataclasses.replace(case, token_ids=(9, *case.token_ids)) for case in CASES]
    assert run.missing(cases, SETTINGS) == 10


def test_the_seed_is_the_random_controls_alone(tmp_path, calls):
    make_run(tmp_path).measure_missing(CASES, SETTINGS, on_results=id)
    assert make_run(tmp_path, seed=1).missing(CASES, SETTINGS) == 5
    assert make_run(tmp_path, batch_size=4).missing(CASES, SETTINGS) == 0
    # The selector stands in the score's place.
    assert make_run(tmp_path).missing(CASES, [setting("mean", score="bound")]) == 0


def test_an_interrupted_run_keeps_what_it_has(tmp_path, calls, monkeypatch):
    def stop(added):
        if calls[-1][0] == "cd":
            raise KeyboardInterrupt

    run = make_run(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.measure_missing(CASES, SETTINGS, on_results=stop)
    again = make_run(tmp_path)
    report = make_report(again, [CASES], SETTINGS, free_tokens=0)
    assert report.progress == "6 of 10" and not report.document()["complete"]
    assert [row.cases for row in report.rows] == [4, 2]


def test_reports_hold_what_was_asked_for_alone(tmp_path, calls):
    run = make_run(tmp_path)
    run.measure_missing(CASES, [*SETTINGS, setting("recent")], on_results=id)
    report = make_report(run, [CASES[:4]], [setting("mean"), setting("recent")], free_tokens=0)
    assert [(row.setting.selector, row.cases) for row in report.rows] == [("mean", 4), ("recent", 4)]
    assert len(report.differences) == 1 and report.document()["complete"]
    assert report.title == "tiny, made up; float32; 8 tokens a step"
    assert "## Against a plain window of the same size" in report.markdown()
    assert any(line.startswith("kind  context") for line in report.terminal())


def test_generated_texts_are_kept_too(tmp_path, monkeypatch):
    made = []

    def run_freely(model, case, settings, *, num_tokens, num_speculative_tokens):
        for each in settings:
            made.append((case.document, each.selector))
            yield FreeRun(case.name, "copy", case.document, 96, each, num_tokens, 3, 8, 8, 1.0, 2.0)

    monkeypatch.setattr(drift_run, "run_freely", run_freely)
    assert runnable(SETTINGS) == SETTINGS[:1]
    for _ in range(2):
        run = make_run(tmp_path)
        run.run_freely_missing(CASES[:2], runnable(SETTINGS), 16, on_results=id)
        assert made == [("a", "mean"), ("b", "mean")]
    assert run.ran_freely(CASES[0], SETTINGS[0], 32) is None and run.missing(CASES, SETTINGS) == 10
    report = make_report(run, [CASES], SETTINGS, free_tokens=16)
    assert report.rows == [] and [row.cases for row in report.free] == [2]


def test_weights_without_a_hash_are_known_by_their_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    checkpoint = SimpleNamespace(sha256=None, directory=tmp_path)
    before = checkpoint_hash(checkpoint)
    assert checkpoint_hash(checkpoint) == before
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert checkpoint_hash(checkpoint) != before
