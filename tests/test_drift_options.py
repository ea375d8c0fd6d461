"""The options of the drift meter: the grid that they name, and what is not allowed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sv_jax import drift_options
from sv_jax.config import UserError
from sv_jax.drift_options import parse_drift_options
from sv_jax.evaluation import selectors, texts


def grid_of(*arguments):
    return parse_drift_options(["drift", *arguments])[1]


def test_the_default_grid():
    options, grid = parse_drift_options(["drift"])
    assert (grid.kinds, grid.contexts, grid.texts) == (texts.KINDS, (4096,), ())
    assert [(a.block_size, a.keep) for a in grid.attentions] == [
        (size, share) for size in (32, 64) for share in (0.1, 0.25, 0.5)
    ]
    assert grid.selectors == selectors.SELECTORS
    assert options.plots and options.num_speculative_tokens == 7 and options.free_running == 0


def test_names_without_jax_are_those_of_the_measuring_code():
    assert selectors.SELECTORS == drift_options.SELECTORS
    assert tuple(selectors.CONTROLS) == drift_options.CONTROLS


def test_lists_are_read():
    grid = grid_of(
        "--kinds=copy, needle", "--contexts=512,1024", "--block-sizes=16", "--keep=.5,1", "--selectors=oracle"
    )
    assert grid.kinds == ("copy", "needle") and grid.contexts == (512, 1024) and grid.selectors == ("oracle",)
    assert [(a.block_size, a.keep) for a in grid.attentions] == [(16, 0.5), (16, 1.0)]


def test_a_file_says_what_the_command_line_does_not(tmp_path):
    path = tmp_path / "some.toml"
    path.write_text('[attention]\nl0 = 512\nrho = 0.2\nanchors = [0, 4]\nblock-size = 16\nscore = "bound"\n')
    grid = grid_of(f"--sparsity={path}")
    (attention,) = grid.attentions
    assert (attention.budget, attention.block_size, attention.anchors) == ((512, 0.2), 16, (0, 4))
    assert grid.selectors == ("bound", "recent", "random", "oracle")
    shares = grid_of(f"--sparsity={path}", "--keep=0.1,0.2", "--block-sizes=64", "--selectors=mean")
    assert [a.budget for a in shares.attentions] == [(0, 0.1), (0, 0.2)]
    assert {(a.block_size, a.anchors) for a in shares.attentions} == {(64, (0, 4))}
    sizes = grid_of(f"--sparsity={path}", "--block-sizes=32,64")
    assert [dataclasses.replace(a, block_size=16) for a in sizes.attentions] == [attention] * 2


def test_own_texts_stand_alone_unless_kinds_are_named(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"text": "some words"}) + "\n")
    assert grid_of(f"--texts={path}").kinds == () and len(grid_of(f"--texts={path}").texts) == 1
    assert grid_of(f"--texts={path}", "--kinds=copy").kinds == ("copy",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: drift"),
        (["drive"], "invalid choice: 'drive'"),
        (["drift", "--kinds", "copy,prose"], "--kinds has 'prose'; allowed: ordinary, copy, needle"),
        (["drift", "--kinds", "copy,copy"], "--kinds 'copy,copy' names something twice"),
        (["drift", "--selectors", "mean,"], "--selectors has ''; allowed: mean, bound"),
        (["drift", "--contexts", "4k"], "--contexts has '4k'; allowed: a whole number of at least 1"),
        (["drift", "--contexts", "0"], "--contexts: 0 is not allowed; allowed: a whole number of at least 1"),
        (["drift", "--keep", "0.1,0"], "--keep: 0.0 is not allowed; allowed: a number above 0, up to 1"),
        (["drift", "--keep", "nan"], "--keep: nan is not allowed"),
        (["drift", "--block-sizes", "48"], "--block-sizes: 48 is not allowed; allowed: 16, 32, 64, 128"),
        (["drift", "--limit", "0"], "--limit 0 is not allowed; allowed: a whole number of at least 1"),
        (["drift", "--free-running", "-1"], "--free-running -1 is not allowed"),
        (["drift", "--sparsity", "/none.toml"], "sparsity file '/none.toml': No such file"),
        (["drift", "--texts", "/none.jsonl"], "--texts '/none.jsonl': No such file"),
    ],
)
def test_what_is_not_allowed(arguments, message):
    with pytest.raises(UserError) as caught:
        parse_drift_options(arguments)
    assert message in str(caught.value)
