"""The option table: what the command line and TOML files accept, refuse and default to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sv_jax.config import UserError
from sv_jax.options import OPTIONS, GenerateOptions, build_parser, flag, parse_options, read_toml

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "x.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_defaults():
    assert parse_options([]) == GenerateOptions()
    expected = {
        "model": "smollm2-135m",
        "prompt": (),
        "prompt_file": None,
        "chat": None,
        "mesh": "1x1",
        "max_new_tokens": 128,
        "num_speculative_tokens": 7,
        "draft_method": "prompt-lookup",
        "dtype": None,
        "max_model_len": None,
        "max_batch_size": 16,
        "ignore_eos": False,
        "check_lossless": False,
        "json": False,
        "stream": True,
        "cache_dir": None,
    }
    assert dataclasses.asdict(GenerateOptions()) == expected


SPELLINGS = [
    # name, on the command line, in TOML, value
    ("model", ["--model", "a/b"], 'model = "a/b"', "a/b"),
    ("prompt", ["--prompt", "one", "--prompt=-two"], 'prompt = ["one", "-two"]', ("one", "-two")),
    ("prompt", ["--prompt", "one"], 'prompt = "one"', ("one",)),
    ("prompt_file", ["--prompt-file", "-"], 'prompt-file = "-"', "-"),
    ("chat", ["--chat"], "chat = true", True),
    ("chat", ["--no-chat"], "chat = false", False),
    ("mesh", ["--mesh", "4x2"], 'mesh = "4x2"', "4x2"),
    ("max_new_tokens", ["--max-new-tokens", "1"], "max-new-tokens = 1", 1),
    ("max_new_tokens", ["--max-new-tokens=9"], "max_new_tokens = 9", 9),
    ("num_speculative_tokens", ["--num-speculative-tokens", "0"], "num-speculative-tokens = 0", 0),
    ("draft_method", ["--draft-method", "none"], 'draft-method = "none"', "none"),
    ("dtype", ["--dtype", "bfloat16"], 'dtype = "bfloat16"', "bfloat16"),
    ("max_model_len", ["--max-model-len", "2"], "max-model-len = 2", 2),
    ("max_batch_size", ["--max-batch-size", "4"], "max-batch-size = 4", 4),
    ("ignore_eos", ["--ignore-eos"], "ignore-eos = true", True),
    ("check_lossless", ["--check-lossless"], "check-lossless = true", True),
    ("json", ["--json"], "json = true", True),
    ("stream", ["--no-stream"], "stream = false", False),
    ("cache_dir", ["--cache-dir", "d"], 'cache-dir = "d"', "d"),
]


def test_every_option_is_spelled_below():
    assert {name for name, *_ in SPELLINGS} == set(OPTIONS)


@pytest.mark.parametrize("name, arguments, line, value", SPELLINGS)
def test_command_line_and_toml_give_the_same(name, arguments, line, value, toml):
    expected = dataclasses.replace(GenerateOptions(), **{name: value})
    assert parse_options(arguments) == expected
    assert parse_options(["--config", toml(line)]) == expected


def test_command_line_wins_over_toml_over_defaults(toml):
    path = toml('mesh = "4x2"\nstream = false\nmax-new-tokens = 5\nchat = true')
    options = parse_options(["--max-new-tokens", "6", "--config", path, "--no-chat"])
    assert (options.mesh, options.stream, options.max_new_tokens) == ("4x2", False, 6)
    assert options.chat is False
    assert options.num_speculative_tokens == 7


def test_prompts_of_the_command_line_replace_those_of_the_toml(toml):
    assert parse_options(["--config", toml('prompt-file = "f"'), "--prompt", "p"]).prompt_file is None
    options = parse_options(["--config", toml('prompt = ["a", "b"]'), "--prompt", "c"])
    assert options.prompt == ("c",)
    options = parse_options(["--config", toml('prompt = "a"'), "--prompt-file", "f"])
    assert (options.prompt, options.prompt_file) == ((), "f")


BAD_ARGUMENTS = [
    (["--max-new-tokens", "0"], "--max-new-tokens 0 is not allowed; allowed: a whole number of at least 1"),
    (["--max-new-tokens", "ten"], "--max-new-tokens 'ten' is not allowed; allowed: a whole number"),
    (["--num-speculative-tokens", "-1"], "--num-speculative-tokens -1 is not allowed; allowed: a whole"),
    (["--draft-method", "eagle"], "--draft-method 'eagle' is not allowed; allowed: prompt-lookup, none"),
    (["--dtype", "float16"], "--dtype 'float16' is not allowed; allowed: float32, bfloat16"),
    (["--max-batch-size", "1.5"], "--max-batch-size '1.5' is not allowed"),
    (["--model", ""], "--model '' is not allowed; allowed: text that is not empty"),
    (
        ["--prompt", "a", "--prompt", ""],
        "--prompt '' is not allowed; allowed: Unicode text that is not blank",
    ),
    (["--prompt", "caf\udce9"], "--prompt 'caf\\udce9' is not allowed; allowed: Unicode text that is not"),
    (["--modle", "x"], "unrecognized arguments: --modle x; --help"),
    (["--max-new", "5"], "unrecognized arguments: --max-new 5"),
    (["--mesh"], "argument --mesh: expected one argument; --help"),
    (["stray"], "unrecognized arguments: stray"),
    (["--prompt", "a", "--prompt-file", "f"], "the command line gives both prompt and prompt-file"),
    (["--config", "missing.toml"], "--config 'missing.toml': No such file or directory"),
    (["--config", "."], "--config '.': Is a directory"),
]


@pytest.mark.parametrize("arguments, message", BAD_ARGUMENTS)
def test_bad_arguments(arguments, message):
    with pytest.raises(UserError) as caught:
        parse_options(arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


BAD_TOML = [
    ("speed = 3", f"unknown key 'speed'; allowed: {', '.join(OPTIONS)}"),
    ("[generate]\nmesh = '1x1'", "unknown key 'generate'"),
    ("config = 'y.toml'", "unknown key 'config'"),
    ("max-new-tokens = '5'", "max-new-tokens = '5' is not allowed; allowed: a whole number of at least 1"),
    ("max-new-tokens = 5.0", "max-new-tokens = 5.0 is not allowed"),
    ("max_new_tokens = true", "max_new_tokens = True is not allowed"),
    ("ignore-eos = 1", "ignore-eos = 1 is not allowed; allowed: true or false"),
    ("chat = 'yes'", "chat = 'yes' is not allowed"),
    ("mesh = [4, 2]", "mesh = [4, 2] is not allowed"),
    ("prompt = [1]", "prompt = [1] is not allowed; allowed: Unicode text that is not blank, or a list"),
    ("prompt = ['a', ' ']", "prompt = ' ' is not allowed; allowed: Unicode text that is not blank"),
    ("json = true\njson = false", "is not valid TOML: "),
    ("max-new-tokens = 1\nmax_new_tokens = 2", "'max_new_tokens' is there twice"),
    ("prompt = 'a'\nprompt-file = 'f'", "gives both prompt and prompt-file"),
]


@pytest.mark.parametrize("text, message", BAD_TOML)
def test_bad_toml(text, message, toml):
    path = toml(text)
    with pytest.raises(UserError) as caught:
        parse_options(["--config", path])
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"--config {path!r}")
    assert "\n" not in str(caught.value)


def test_toml_that_is_not_utf8(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b'model = "\xff"')
    with pytest.raises(UserError, match="is not valid TOML"):
        read_toml(str(path))


def test_help_names_every_option():
    text = build_parser().format_help()
    assert all(flag(name) in text for name in OPTIONS)
    assert "smollm2-135m" in text and "--config" in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_example_configs_load(path):
    assert read_toml(str(path))


def test_there_are_example_configs():
    assert {"emulated_mesh.toml", "quoting.toml"} <= {path.name for path in CONFIGS}
