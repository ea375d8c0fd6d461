"""Sparsity files that are written: what is read back, and what is not overwritten."""

from __future__ import annotations

import os
import tomllib

import numpy as np
import pytest

from sv_jax.config import UserError
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig, read_sparsity
from sv_jax.sparsity_file import check_target, render, toml_value, write_sparsity

VALUES = [
    "plain",
    "",
    'quo"te \\ back\\slash',
    "lines\nand\ttabs\r and \x00 \x1f \x7f \x85 \u2028",
    "Grüße, 你好 👍",
    "# no comment, [no table]",
    0,
    -5,
    2**40,
    0.25,
    1e-7,
    1e22,
    -0.0,
    True,
    False,
    [],
    [1, 2],
    ["a", 'b"'],
    [0.5, 1e-9],
]


@pytest.mark.parametrize("value", VALUES, ids=map(repr, VALUES))
def test_values_are_read_back(value):
    found = tomllib.loads(f"x = {toml_value(value)}")["x"]
    assert found == value and type(found) is type(value)


def test_numpys_floats_are_floats():
    assert toml_value(np.float64(0.1)) == "0.1"
    with pytest.raises(TypeError, match="None is no text"):
        toml_value(None)


def test_a_file_is_what_it_was_made_of(tmp_path):
    path = tmp_path / "x.toml"
    attention = AttentionSparsity(keep=0.125, block_size=32, score="mass", anchors=(0, 3), dense_layers=(1,))
    provenance = {
        "model": 'a "b" \\ é',
        "model_sha256": None,
        "texts": ("one", "two\n"),
        "odd key.": 1,
        "": 2,
    }
    write_sparsity(
        path,
        SparsityConfig(attention),
        provenance,
        heading=["first\nno = table", ""],
        remarks=["last"],
        force=False,
    )
    kept = {"model": 'a "b" \\ é', "texts": ["one", "two\n"], "odd key.": 1, "": 2}
    assert read_sparsity(path) == SparsityConfig(attention, provenance=tuple(kept.items()))
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# first?no = table\n#\n[attention]\nkeep = 0.125\nblock-size = 32\n")
    assert text.endswith("\n\n# last\n")
    assert os.listdir(tmp_path) == ["x.toml"]


def test_what_is_not_said_is_not_written():
    assert render(SparsityConfig(), {}) == (
        '[attention]\nblock-size = 64\nsink-blocks = 1\nlocal-blocks = 2\nscore = "mass"\n'
    )


def test_names_that_utf_8_does_not_have(tmp_path):
    write_sparsity(tmp_path / "x.toml", SparsityConfig(), {"model": "m\udcff"}, force=False)
    assert read_sparsity(tmp_path / "x.toml").provenance == (("model", "m?"),)


def test_nothing_is_overwritten_unless_it_is_wished(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("mine")
    for refused in (lambda: check_target(path, force=False), lambda: write(path, force=False)):
        with pytest.raises(UserError, match=r"x\.toml' is there already; allowed: another name, or --force"):
            refused()
        assert path.read_text() == "mine"
    write(path, force=True)
    assert read_sparsity(path).attention.keep == 0.5


def write(path, *, force: bool) -> None:
    write_sparsity(path, SparsityConfig(AttentionSparsity(keep=0.5)), {}, force=force)


def test_places_where_no_file_can_be(tmp_path):
    with pytest.raises(UserError, match="missing' is no directory; allowed: a file in one that exists"):
        check_target(tmp_path / "missing" / "x.toml", force=True)
    with pytest.raises(UserError, match="is a directory; allowed: the name of a file"):
        check_target(tmp_path, force=True)
    if os.path.exists("/proc/self/fd"):
        with pytest.raises(UserError, match=r"--output '/proc/x\.toml': .*; allowed: a file where files"):
            check_target(type(tmp_path)("/proc/x.toml"), force=False)
