"""The drift meter from its command line, on a tiny model and the user's texts."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from sv_jax import evaluate
from sv_jax.evaluation import drift_run, plots
from tests.engine import tiny_directory

GRID = ["--contexts=256", "--block-sizes=16", "--keep=0.25,1", "--selectors=mean,recent,oracle"]
DRIFT_FILES = {"drift.json", "drift.md", "results.jsonl"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_directory.write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def command(tiny, tmp_path):
    """Arguments of a run on two kinds of texts: three cases of "own", one of "mail"."""
    generator = np.random.default_rng(0)
    lines = [
        {"text": " ".join(f"w{i}" for i in generator.integers(0, tiny_directory.V, 300))} for _ in range(4)
    ]
    lines[3]["kind"] = "mail"
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    files = [f"--model={tiny}", f"--texts={path}", f"--output={out}", f"--cache-dir={tmp_path / 'cache'}"]
    return ["drift", *files, "--batch-size=2", *GRID]


def test_a_run_and_the_same_command_again(command, tmp_path, capsys, monkeypatch):
    assert evaluate.main([*command, "--json", "--no-plots"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert out.count("\n") == 1 and document["complete"]
    rows = {
        (r["kind"], r["setting"]["selector"], r["setting"]["attention"]["keep"]): r for r in document["rows"]
    }
    assert len(rows) == 12 and rows["own", "mean", 0.25]["cases"] == 3
    whole, some = rows["own", "mean", 1.0], rows["own", "mean", 0.25]
    assert whole["agreement"][0] == 1.0 and abs(whole["kl"][0]) < 1e-5 and whole["positions"] == 3 * 128
    assert some["agreement"][0] < 1.0 and some["kl"][0] > 1e-3 and some["share"] < 0.5
    assert "24 results, 0 of them from" in err and "own       240     16  0.25  mean" in err
    assert {path.name for path in (tmp_path / "out").iterdir()} == DRIFT_FILES
    assert json.loads((tmp_path / "out" / "drift.json").read_text()) == document

    monkeypatch.setattr(drift_run, "measure", None)  # nothing is left to be measured
    assert evaluate.main([*command, "--no-plots"]) == 0
    out, err = capsys.readouterr()
    assert "24 results, 24 of them from" in err and "loading" not in err
    assert out.splitlines()[4].startswith("own       240     16  0.25  mean")
    assert json.loads((tmp_path / "out" / "drift.json").read_text()) == document


def test_an_interrupt_keeps_what_is_there(command, tmp_path, capsys, monkeypatch):
    measure, calls = drift_run.measure, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(drift_run, "measure", interrupted)
    assert evaluate.main([*command, "--no-plots"]) == 130
    out, err = capsys.readouterr()
    assert err.endswith(
        f"interrupted: 12 of 24 results are in {tmp_path / 'out' / 'results.jsonl'}; "
        "the same command goes on from there\n"
    )
    assert "own" in out and not json.loads((tmp_path / "out" / "drift.json").read_text())["complete"]
    assert evaluate.main([*command, "--no-plots"]) == 0
    assert "24 results, 12 of them from" in capsys.readouterr().err


def test_generated_texts_and_figures(command, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert evaluate.main([*command, "--free-running=8", "--limit=1"]) == 0
    document = json.loads((tmp_path / "out" / "drift.json").read_text())
    free = {(r["kind"], r["setting"]["attention"]["keep"]): r for r in document["free_running"]}
    assert len(free) == 4 and free["own", 1.0]["identical"] == free["own", 1.0]["cases"] == 1
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {".json", ".jsonl", ".md", ".png"}
    assert "Generated texts beside dense verification's" in capsys.readouterr().out


def test_plots_are_left_out_without_matplotlib(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    assert evaluate.main([*command, "--limit=1", "--keep=1", "--selectors=mean"]) == 0
    assert "no plots: matplotlib is missing; pip install" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == DRIFT_FILES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts=256,2000"], "--contexts has 2000; allowed for {model}: at most 1100"),
        (["--contexts=300,600"], "line 1: the text fills none of the contexts 600"),
        (["--contexts=100"], "a context of 100 tokens is too short; allowed: at least 145"),
        (["--mesh=8"], "mesh '8'"),
        (["--model=none"], "unknown model 'none'"),
    ],
)
def test_one_line_for_a_mistake(command, tiny, capsys, arguments, message):
    arguments = [a.replace("300,", "") for a in arguments]
    assert evaluate.main([*command, *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and message.format(model=tiny) in last


def test_layers_that_the_model_does_not_have(command, tmp_path, capsys):
    (tmp_path / "far.toml").write_text("[attention]\nanchors = [0, 9]\n")
    assert evaluate.main([*command, f"--sparsity={tmp_path / 'far.toml'}"]) == 2
    assert "9" in capsys.readouterr().err.splitlines()[-1]


def test_mistakes_are_told_without_jax(tmp_path):
    (tmp_path / "file").write_text("")
    for arguments in (["--keep=2"], [f"--output={tmp_path / 'file'}"], ["--help"]):
        code = (
            "import sys\nfrom sv_jax import evaluate\n"
            f"try: code = evaluate.main({['drift', *arguments]!r})\n"
            "except SystemExit as stop: code = stop.code\n"
            "sys.exit(10 * code + ('jax' in sys.modules or 'tokenizers' in sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
        assert done.returncode == (0 if arguments == ["--help"] else 20), done.stderr.decode()
