"""The options of sparse verification: spelling, files, which value wins, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sv_jax.config import UserError
from sv_jax.option_table import flag
from sv_jax.options import OPTIONS, GenerateOptions, parse_options
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig, read_sparsity
from sv_jax.sparsity_options import ATTENTION, SPARSE_ONLY, read_sparsity_options
from tests.fake_engine import python

FILES = sorted((Path(__file__).parent.parent / "configs" / "sparsity").glob("*.toml"))


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "x.toml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def attention_of(*arguments: str) -> AttentionSparsity:
    config = read_sparsity_options(parse_options(["--verify=sparse", *arguments]))
    assert config is not None
    return config.attention


SPELLINGS = [
    # name, on the command line, in TOML, value
    ("sparsity", ["--sparsity", "f.toml"], 'sparsity = "f.toml"', "f.toml"),
    ("l0", ["--l0", "1024"], "l0 = 1024", 1024),
    ("rho", ["--rho", "0"], "rho = 0", 0.0),
    ("keep", ["--keep", ".25"], "keep = 0.25", 0.25),
    ("keep", ["--keep", "1"], "keep = 1", 1.0),
    ("block_size", ["--block-size", "32"], "block-size = 32", 32),
    ("sink_blocks", ["--sink-blocks", "0"], "sink_blocks = 0", 0),
    ("local_blocks", ["--local-blocks", "4"], "local-blocks = 4", 4),
    ("score", ["--score", "bound"], 'score = "bound"', "bound"),
    ("anchors", ["--anchors", "8,0, 4"], "anchors = [8, 0, 4]", (0, 4, 8)),
    ("anchors", ["--anchors=0"], "anchors = [0]", (0,)),
    ("dense_layers", ["--dense-layers", "29,0"], "dense-layers = [0, 29]", (0, 29)),
]


def test_every_option_is_spelled_above():
    assert {name for name, *_ in SPELLINGS} == {"sparsity", *ATTENTION}  # the others': test_ffn_options.py
    assert set(ATTENTION) < set(SPARSE_ONLY) < set(OPTIONS)


@pytest.mark.parametrize("name, arguments, line, value", SPELLINGS)
def test_command_line_and_toml_give_the_same(name, arguments, line, value, write):
    expected = dataclasses.replace(GenerateOptions(), verify="sparse", **{name: value})
    by_toml = ["--config", write(f'verify = "sparse"\n{line}')]
    for options in (parse_options(["--verify=sparse", *arguments]), parse_options(by_toml)):
        assert options == expected
        assert type(getattr(options, name)) is type(value)
        if name != "sparsity":
            config = read_sparsity_options(options)
            assert config is not None and config.attention == AttentionSparsity(**{name: value})


def test_nothing_given():
    assert read_sparsity_options(parse_options([])) is None
    assert read_sparsity_options(parse_options(["--verify", "dense"])) is None
    config = read_sparsity_options(parse_options(["--verify", "sparse"]))
    assert config == SparsityConfig() and config.attention.budget == (4096, 0.1)


FILE = """
[attention]
block-size = 16
score = "bound"
anchors = [0, 4]
{budget}
[provenance]
model = "m"
"""
PAPER, KEEP = {"l0": 512, "rho": 0.5}, {"keep": 0.3}
KEEP_L0 = {"l0": 64, "keep": 0.3}
WINS = [
    # the file's budget, arguments, what comes of both
    (PAPER, [], PAPER),
    (KEEP, [], KEEP),
    (PAPER, ["--keep=.2"], {"keep": 0.2}),
    (PAPER, ["--keep=.2", "--l0=7"], {"keep": 0.2, "l0": 7}),
    (PAPER, ["--l0=7"], {"l0": 7, "rho": 0.5}),
    (PAPER, ["--rho=0"], {"l0": 512, "rho": 0.0}),
    (KEEP, ["--rho=.2"], {"rho": 0.2}),
    (KEEP, ["--rho=.2", "--l0=0"], {"rho": 0.2, "l0": 0}),
    (KEEP, ["--l0=9"], {"keep": 0.3, "l0": 9}),
    (KEEP_L0, ["--keep=.4"], {"keep": 0.4}),
    (KEEP_L0, ["--rho=.4"], {"rho": 0.4, "l0": 64}),
]


@pytest.mark.parametrize("budget, arguments, expected", WINS)
def test_options_win_over_the_file(budget, arguments, expected, write):
    path = write(FILE.format(budget="\n".join(f"{name} = {value}" for name, value in budget.items())))
    others = {"block_size": 16, "score": "bound", "anchors": (0, 4)}
    assert attention_of("--sparsity", path, *arguments) == AttentionSparsity(**expected, **others)


@pytest.mark.parametrize("budget, arguments, expected", WINS)
def test_the_command_line_wins_over_toml_as_over_a_file(budget, arguments, expected, write):
    lines = ['verify = "sparse"', *(f"{name} = {value}" for name, value in budget.items())]
    config = read_sparsity_options(parse_options(["--config", write("\n".join(lines)), *arguments]))
    assert config is not None and config.attention == AttentionSparsity(**expected)


def test_three_sources(write):
    path = write(FILE.format(budget="keep = 0.3"))
    lines = f"""
    verify = "sparse"
    sparsity = {path!r}
    rho = 0.2
    block-size = 32
    """
    config = ["--config", write(lines, "config.toml")]
    options = parse_options([*config, "--block-size=64", "--anchors=0"])
    got = read_sparsity_options(options)
    assert got is not None and got.provenance == (("model", "m"),)
    assert got.attention == AttentionSparsity(rho=0.2, block_size=64, score="bound", anchors=(0,))


def test_verify_dense_switches_a_toml_file_off(write):
    path = write('verify = "sparse"\nkeep = 0.5\nseed = 3')
    assert parse_options(["--config", path, "--verify=dense"]) == GenerateOptions(seed=3)


BAD_ARGUMENTS = [
    (["--keep", "0"], "--keep 0.0 is not allowed; allowed: a number above 0, up to 1"),
    (["--keep", "most"], "--keep 'most' is not allowed"),
    (["--rho", "1.5"], "--rho 1.5 is not allowed; allowed: a number from 0 to 1"),
    (["--l0", "-1"], "--l0 -1 is not allowed; allowed: a whole number from 0 to"),
    (["--block-size", "48"], "--block-size 48 is not allowed; allowed: 16, 32, 64, 128"),
    (["--sink-blocks", "-1"], "--sink-blocks -1 is not allowed"),
    (["--local-blocks", "0"], "--local-blocks 0 is not allowed; allowed: a whole number of at least 1"),
    (["--score", "max"], "--score 'max' is not allowed; allowed: mean, bound"),
    (["--anchors", "0,x"], "--anchors has 'x'; allowed: a list of different layer numbers"),
    (["--anchors", "0;4"], "--anchors has '0;4'"),
    (["--anchors="], "--anchors has ''"),
    (["--anchors", "9" * 5000], "--anchors has '999"),
    (["--anchors", "0,4,0"], "--anchors [0, 4, 0] names a layer twice"),
    (["--dense-layers", "-1"], "--dense-layers has '-1'"),
    (["--keep=.5", "--rho=.5"], "the command line gives both keep and rho; allowed: one of the two"),
    (["--verify", "maybe"], "--verify 'maybe' is not allowed; allowed: dense, sparse"),
    (["--sparsity", "missing.toml"], "sparsity file 'missing.toml': No such file or directory"),
    (["--sparsity", "."], "sparsity file '.': Is a directory"),
]


@pytest.mark.parametrize("arguments, message", BAD_ARGUMENTS)
def test_bad_arguments(arguments, message):
    with pytest.raises(UserError) as caught:
        attention_of(*arguments)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


BAD_TOML = [
    ("keep = 0.5\nrho = 0.5", "gives both keep and rho; allowed: one of the two"),
    ("block-size = 16.0", "block-size = 16.0 is not allowed; allowed: 16, 32, 64, 128"),
    ("anchors = '0,4'", "anchors '0,4' is not allowed; allowed: a list of different layer numbers"),
    ("anchors = [0, -1]", "anchors has -1; allowed: a list"),
    ("dense-layers = [1, 1]", "dense-layers [1, 1] names a layer twice"),
]


@pytest.mark.parametrize("text, message", BAD_TOML)
def test_bad_toml(text, message, write):
    path = write(text)
    with pytest.raises(UserError) as caught:
        attention_of("--config", path)
    assert str(caught.value).startswith(f"--config {path!r}") and message in str(caught.value)


@pytest.mark.parametrize("name, arguments, line, value", SPELLINGS)
@pytest.mark.parametrize("verify", ["", "dense"])
def test_options_that_dense_verification_would_ignore(name, arguments, line, value, verify, write):
    told = "says how to verify sparsely; allowed: only with --verify sparse"
    dense = ["--verify", verify] if verify else []
    with pytest.raises(UserError) as caught:
        parse_options([*arguments, *dense])
    assert str(caught.value) == f"{flag(name)} {told}"
    path = write(f'verify = "dense"\n{line}' if verify else line)
    with pytest.raises(UserError) as caught:
        parse_options(["--config", path])
    assert str(caught.value) == f"--config {path!r}: {flag(name)[2:]} {told}"


def test_a_bad_file_is_one_line(write):
    path = write("[attention]\nkeep = 2")
    with pytest.raises(UserError, match="keep 2 is not allowed; allowed: a number above 0, up to 1"):
        attention_of("--sparsity", path)


def test_configurations_do_not_import_jax():
    code = """if True:
        import sys, sv_jax
        from sv_jax.options import parse_options
        from sv_jax.sparsity_options import read_sparsity_options
        read_sparsity_options(parse_options(["--verify", "sparse", "--keep", "0.5"]))
        sv_jax.SparsityConfig(sv_jax.AttentionSparsity(keep=0.5))
        sys.exit("jax" in sys.modules)
    """
    assert python(code).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_example_files_load(path):
    assert read_sparsity_options(
        parse_options(["--verify=sparse", "--sparsity", str(path)])
    ) == read_sparsity(path)


def test_there_are_example_files():
    assert {path.name for path in FILES} >= {
        "keep25.toml",
        "paper.toml",
        "smollm2-135m.toml",
        "smollm2-135m-moe.toml",
    }
    by_name = {path.name: read_sparsity(path).attention for path in FILES}
    assert by_name["paper.toml"].budget == AttentionSparsity().budget
    assert by_name["keep25.toml"].budget == (0, 0.25)
    calibrated = by_name["smollm2-135m.toml"]
    assert calibrated.anchors and calibrated.dense_layers and len(calibrated.anchors) <= 15
