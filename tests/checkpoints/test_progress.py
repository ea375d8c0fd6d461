"""Progress on stderr: bars on terminals only, so that no log is full of carriage returns."""

from __future__ import annotations

import sys

import pytest

from sv_jax.checkpoints import load_params
from sv_jax.checkpoints.hf_config import model_config
from sv_jax.checkpoints.progress import progress_bar
from tests.checkpoints import tiny


def _run(*, progress: bool, unit: str = "B") -> None:
    with progress_bar("loading", 538_000_000, unit, progress=progress) as bar:
        bar.set_postfix_str("half")
        bar.update(269_000_000)
        bar.refresh()


@pytest.mark.parametrize("unit, size", [("B", "538MB"), ("tensor", "538000000 tensors")])
def test_a_log_gets_one_line(capsys, unit, size):
    _run(progress=True, unit=unit)
    assert capsys.readouterr().err == f"loading ({size})\n"


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _run(progress=True)
    text = capsys.readouterr().err
    assert "loading" in text and "\r" in text and "\n" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_silence_on_request(capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    _run(progress=False)
    assert capsys.readouterr().err == ""


def test_loading_leaves_no_carriage_return(capsys, tmp_path):
    config = tiny.config_dict("llama")
    checkpoint = tiny.save(tmp_path, config, tiny.tensors(model_config(config)))
    load_params(checkpoint, tiny.tree(checkpoint.config))
    text = capsys.readouterr().err
    assert text.startswith("loading (") and text.count("\n") == 1 and "\r" not in text
