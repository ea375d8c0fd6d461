"""The options of sparse feed-forward networks and experts: spelling, files, which value wins, refusals."""

from __future__ import annotations

import dataclasses

import pytest

from sv_jax.config import UserError
from sv_jax.options import GenerateOptions, parse_options
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig, read_sparsity
from sv_jax.sparsity.ffn_config import ChannelSparsity, ExpertSparsity
from sv_jax.sparsity_file import write_sparsity
from sv_jax.sparsity_options import EXPERTS, FFN, read_sparsity_options


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "x.toml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def read(*arguments: str) -> SparsityConfig:
    config = read_sparsity_options(parse_options(["--verify=sparse", *arguments]))
    assert config is not None
    return config


SPELLINGS = [
    ("ffn_rule", ["--ffn-rule", "product"], 'ffn-rule = "product"', "product"),
    ("ffn_threshold", ["--ffn-threshold", ".05"], "ffn-threshold = 0.05", 0.05),
    ("ffn_keep", ["--ffn-keep", "0.5"], "ffn_keep = 0.5", 0.5),
    ("experts_per_token", ["--experts-per-token", "2"], "experts-per-token = 2", 2),
    ("skip_experts", ["--skip-experts", "3"], "skip-experts = 3", 3),
    ("skip_reading", ["--skip-reading", "largest"], 'skip-reading = "largest"', "largest"),
    ("expert_shortlist", ["--expert-shortlist", "20"], "expert-shortlist = 20", 20),
    ("expert_capacity", ["--expert-capacity", "1.5"], "expert-capacity = 1.5", 1.5),
    ("shortlist_outside", ["--shortlist-outside", "repick"], 'shortlist-outside = "repick"', "repick"),
]


def test_every_option_is_spelled_above():
    assert {name for name, *_ in SPELLINGS} == {*FFN, *EXPERTS}


@pytest.mark.parametrize("name, arguments, line, value", SPELLINGS)
def test_command_line_and_toml_give_the_same(name, arguments, line, value, write):
    expected = dataclasses.replace(GenerateOptions(), verify="sparse", **{name: value})
    by_toml = ["--config", write(f'verify = "sparse"\n{line}')]
    for options in (parse_options(["--verify=sparse", *arguments]), parse_options(by_toml)):
        assert options == expected and type(getattr(options, name)) is type(value)
    with pytest.raises(UserError, match="says how to verify sparsely; allowed: only with --verify sparse"):
        parse_options(arguments)


GATE, SHARED = ChannelSparsity(thresholds=(0.1, 0.2)), ChannelSparsity("shared", keep=0.5)
PRODUCT, ALL, ONE = ChannelSparsity("product", (0.1, 0.2)), ChannelSparsity("shared", keep=1.0), (1.0,)
SKIP = ExpertSparsity(max_skipped=2, betas=((0.1, 0.2), (0.3, 0.4)))
SKIP_ONE = dataclasses.replace(SKIP, max_skipped=1)
BEST = dataclasses.replace(SKIP, max_skipped=None, experts_per_token=1)
HALF = AttentionSparsity(keep=0.5)
WINS = [
    # the file's parts, arguments, what comes of both
    ((None, GATE), [], (None, GATE)),
    ((None, GATE), ["--ffn-keep=.5"], (None, SHARED)),
    ((None, GATE), ["--ffn-rule=product"], (None, PRODUCT)),
    ((None, SHARED), ["--ffn-threshold=1"], (None, ChannelSparsity("gate", ONE))),
    ((None, PRODUCT), ["--ffn-threshold=1"], (None, ChannelSparsity("product", ONE))),
    ((None, SHARED), ["--ffn-keep=1"], (None, ALL)),
    ((None, GATE), ["--keep=.5"], (HALF, GATE)),
    ((HALF,), ["--ffn-keep=.5"], (HALF, SHARED)),
    ((None, None, SKIP), ["--skip-experts=1"], (None, None, SKIP_ONE)),
    ((None, None, SKIP), ["--experts-per-token=1", "--ffn-keep=.5"], (None, SHARED, BEST)),
    ((None, None, BEST), ["--skip-experts=1"], (None, None, SKIP_ONE)),
]


@pytest.mark.parametrize("in_file, arguments, expected", WINS)
def test_options_win_over_the_file(in_file, arguments, expected, tmp_path):
    """Written and read back, too: parts that are not there stay away."""
    write_sparsity(tmp_path / "x.toml", SparsityConfig(*in_file), {}, force=False)
    assert read("--sparsity", str(tmp_path / "x.toml"), *arguments) == SparsityConfig(*expected)


def test_without_a_file():
    assert read("--expert-shortlist=5") == SparsityConfig(None, None, ExpertSparsity(shortlist=5))
    assert read("--ffn-keep=.5", "--l0=7") == SparsityConfig(AttentionSparsity(l0=7), SHARED)
    assert read() == SparsityConfig()


BAD = [
    ("[ffn]", "ffn rule 'gate' with no thresholds; allowed: thresholds and no keep"),
    ('[ffn]\nrule = "shared"\nthresholds = [1]', "'shared' with no keep; allowed: keep and no thresholds"),
    ('[ffn]\nrule = "shared"\nkeep = 0.5\nthresholds = [1]', "with thresholds; allowed: keep and no thr"),
    ('[ffn]\nrule = "best"', "ffn rule 'best' is not allowed; allowed: gate, product, shared"),
    ("[ffn]\nthresholds = 0.5", "ffn thresholds 0.5 is not allowed; allowed: a list of numbers"),
    ("[ffn]\nthresholds = [0, -1]", "ffn thresholds: entry 1 -1 is not allowed; allowed: a number of at l"),
    ('[ffn]\nrule = "shared"\nkeep = 0', "ffn keep 0 is not allowed; allowed: a number above 0, up to 1"),
    ("[ffn]\nthresholds = [0]\ndense-layers = [1, 1]", r"ffn dense-layers \[1, 1\] names a layer twice"),
    (
        "[experts]",
        "experts leave nothing out; allowed: experts-per-token, max-skipped, shortlist, cap",
    ),
    ("[experts]\nshortlist = 0", "experts shortlist 0 is not allowed; allowed: a whole number of at least 1"),
    ("[experts]\nmax-skipped = 2", "experts max-skipped 2 without betas; allowed: with the betas of a"),
    ("[experts]\nmax-skipped = 2\nbetas = [[0.5, 2]]", "betas of entry 0: entry 1 2 is not allowed; allowed"),
    ("[experts]\nmax-skipped = 2\nbetas = 3", "experts betas 3; allowed: a list of numbers for each layer"),
    (
        "[experts]\nmax-skipped = 2\nbetas = [[0.5]]\nexperts-per-token = 1",
        "max-skipped 2 and experts-per-token 1 are both given; allowed: one of the two",
    ),
    ('[experts]\nshortlist = 2\noutside = "x"', "experts outside 'x' is not allowed; allowed: truncate, rep"),
    (
        '[experts]\nshortlist = 2\nreading = "x"',
        "experts reading 'x' is not allowed; allowed: first, largest",
    ),
    ("[experts]\nshortlist = 2\nrenormalise = 1", "experts renormalise 1 is not allowed; allowed: true, fal"),
    ("[experts]\nshort = 2", r"unknown key 'short' in \[experts\]; allowed: betas, capacity_factor"),
    ("[moe]", "unknown key 'moe'; allowed: attention, ffn, experts, provenance"),
]


@pytest.mark.parametrize("text, message", BAD)
def test_files_that_are_refused(text, message, write):
    with pytest.raises(UserError, match=message):
        read_sparsity(write(text))


def test_a_config_in_which_nothing_is_sparse():
    with pytest.raises(UserError, match="nothing is sparse; allowed: one or more of attention, ffn, experts"):
        SparsityConfig(None)


def test_skipping_on_the_command_line_needs_betas():
    with pytest.raises(UserError, match="experts max-skipped 2 without betas"):
        read("--skip-experts=2")
