"""From measurements to rows, tables and figures."""

from __future__ import annotations

import json
import math

import pytest

from sv_jax.evaluation import plots
from sv_jax.evaluation.free_running import FreeRun
from sv_jax.evaluation.report import as_document, differences, drift_rows, free_rows
from sv_jax.evaluation.statistics import Interval
from sv_jax.evaluation.tables import (
    budget_label,
    difference_table,
    drift_table,
    free_table,
    interval,
    layers_label,
    markdown,
    terminal,
)
from sv_jax.sparsity.config import AttentionSparsity
from tests.evaluation.measurements import measurement, setting

MEAN, RECENT = setting("mean"), setting("recent")
COPIES = [
    measurement("copy/a/96", MEAN, agreeing=10, kl=0.0),
    measurement("copy/b/96", MEAN, agreeing=8, kl=1.0, agreeing_prefix=5),
    measurement("copy/a/96", RECENT, agreeing=6, kl=4.0),
    measurement("copy/b/96", RECENT, agreeing=4, kl=5.0),
]
NEEDLES = [
    measurement("needle/a/96/0", MEAN, found=True, dense_found=True),
    measurement("needle/a/96/1", MEAN, found=False, dense_found=True),
    measurement("needle/b/96/0", MEAN, found=False, dense_found=False),
]


def test_a_row_sums_cases_and_counts_documents():
    mean, recent, needles = drift_rows(COPIES + NEEDLES)
    assert (mean.kind, mean.context, mean.setting) == ("copy", 96, MEAN)
    assert (mean.cases, mean.documents, mean.positions) == (2, 2, 20)
    assert mean.agreement == Interval(0.9, 0.8, 1.0) and mean.kl == Interval(0.05, 0.0, 0.1)
    assert mean.agreeing_prefix.value == 4 and mean.share == 0.25 and mean.found is None
    assert recent.agreement.value == 0.5 and recent.setting == RECENT
    assert (needles.cases, needles.documents) == (3, 2)
    assert needles.found is not None and needles.found.value == pytest.approx(1 / 3)
    assert needles.dense_found == pytest.approx(2 / 3)


def test_differences_are_of_the_same_cases_and_budget():
    lonely = measurement("copy/c/96", MEAN, agreeing=0)  # the window has not been measured on it
    other = measurement("copy/a/96", setting("mean", 0.5))  # nor with this budget
    (found,) = differences([*COPIES, lonely, other])
    assert found.setting == MEAN and found.agreement == Interval(*(pytest.approx(0.4),) * 3)
    assert found.kl == Interval(*(pytest.approx(-0.4),) * 3)


def test_tables_for_terminals_and_markdown():
    table = drift_table(drift_rows(COPIES + NEEDLES))
    lines = terminal(table)
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[:5] == ["kind", "context", "block", "keep", "selector"]
    assert "copy         96     32  0.25  mean          2  0.900 [0.800, 1.000]" in lines[1]
    assert "0.33 [" in lines[3] and "(0.67)" in lines[3] and lines[3].endswith("  25   25 %")
    rows = markdown(table)
    assert rows[0].startswith("| kind | context | block |") and rows[1].startswith("| --- | ---: | ---: |")
    assert {line.count("|") for line in rows} == {rows[0].count("|")}
    assert "found (dense)" not in drift_table(drift_rows(COPIES))[0]
    assert difference_table(differences(COPIES))[1][0][-2].startswith("0.400 [0.400")


def test_labels():
    assert budget_label(AttentionSparsity(keep=0.1)) == "0.1"
    assert budget_label(AttentionSparsity(keep=0.1, l0=512)) == "512+0.1"
    assert budget_label(AttentionSparsity()) == "4096+0.1"
    assert layers_label(AttentionSparsity(anchors=(0, 4), dense_layers=(1,))) == "anchors 0,4; dense layers 1"
    assert layers_label(AttentionSparsity()) == ""
    assert interval(Interval(0.5)) == "0.500 [-, -]"
    assert interval(Interval(-1e-6, -0.2, 0.2), 2) == "0.00 [-0.20, 0.20]"


def test_documents_are_json():
    document = as_document(drift_rows(COPIES))
    assert json.loads(json.dumps(document))[0]["agreement"] == [0.9, 0.8, 1.0]
    assert document[0]["setting"]["attention"]["keep"] == 0.25
    assert math.isnan(as_document(drift_rows(NEEDLES[:1]))[0]["kl"][1])


def test_generated_texts():
    run = {"kind": "copy", "context": 96, "setting": MEAN, "tokens": 33, "dense_steps": 8}
    runs = [
        FreeRun("copy/a/96", document="a", same_tokens=33, steps=8, bytes_per_token=20.0,
                dense_bytes_per_token=40.0, **run),
        FreeRun("copy/b/96", document="b", same_tokens=5, steps=16, bytes_per_token=None,
                dense_bytes_per_token=None, **run),
    ]  # fmt: skip
    (row,) = free_rows(runs)
    assert (row.cases, row.identical, row.same_tokens.value, row.share) == (2, 1, 19, 0.5)
    assert row.acceptance.value == pytest.approx(64 / 24) and row.dense_acceptance.value == 4
    assert free_table([row])[1][0][5:9] == ["2", "19.0 [5.0, 33.0]", "33", "1"]
    assert free_table(free_rows(runs[1:]))[1][0][-1] == "-"


def test_a_figure_for_each_kind_and_context(tmp_path):
    pytest.importorskip("matplotlib")
    grid = [
        measurement(f"{case}/96", setting(selector, keep, size), kl=keep, kv_bytes=keep * 1e5)
        for case in ("copy/a", "copy/b", "my mail../x")
        for selector in ("mean", "recent")
        for keep in (0.1, 0.5)
        for size in (32, 64)
    ]
    grid += NEEDLES  # one document, no intervals
    paths = plots.write_plots(drift_rows(grid), tmp_path, title="tiny")
    assert sorted(path.name for path in paths) == sorted(path.name for path in tmp_path.iterdir())
    names = {f"drift-{kind}-96.png" for kind in ("copy", "needle", "my_mail__")}
    assert {path.name for path in paths} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in paths)
