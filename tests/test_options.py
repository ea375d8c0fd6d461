"""The option table: what the command line and TOML files accept, refuse and default to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sv_jax.config import UserError
from sv_jax.option_table import flag
from sv_jax.options import OPTIONS, GenerateOptions, build_parser, parse_options, read_toml
from sv_jax.sampling_params import SamplingParams
from sv_jax.sparsity_options import SPARSE_ONLY

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
        "kv_shard": "none",
        "expert_shard": "model",
        "max_new_tokens": 128,
        "min_new_tokens": 0,
        "stop": (),
        "include_stop": False,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "num_speculative_tokens": 7,
        "draft_method": "prompt-lookup",
        "verify": "dense",
        "sparsity": None,
        "l0": None,
        "rho": None,
        "keep": None,
        "block_size": None,
        "sink_blocks": None,
        "local_blocks": None,
        "score": None,
        "anchors": None,
        "dense_layers": None,
        "ffn_rule": None,
        "ffn_threshold": None,
        "ffn_keep": None,
        "experts_per_token": None,
        "skip_experts": None,
        "skip_reading": None,
        "expert_shortlist": None,
        "shortlist_outside": None,
        "expert_capacity": None,
        "dtype": None,
        "implementation": None,
        "max_model_len": None,
        "max_batch_size": 16,
        "ignore_eos": False,
        "check_lossless": False,
        "logprobs": 0,
        "json": False,
        "stream": True,
        "cache_dir": None,
        "plan_only": False,
        "platform": None,
        "compile_check": True,
        "batch_size": None,
    }
    assert dataclasses.asdict(GenerateOptions()) == expected
    assert GenerateOptions().sampling == SamplingParams()


SPELLINGS = [
    # name, on the command line, in TOML, value
    ("model", ["--model", "a/b"], 'model = "a/b"', "a/b"),
    ("prompt", ["--prompt", "one", "--prompt=-two"], 'prompt = ["one", "-two"]', ("one", "-two")),
    ("prompt", ["--prompt", "one"], 'prompt = "one"', ("one",)),
    ("prompt_file", ["--prompt-file", "-"], 'prompt-file = "-"', "-"),
    ("chat", ["--chat"], "chat = true", True),
    ("chat", ["--no-chat"], "chat = false", False),
    ("mesh", ["--mesh", "4x2"], 'mesh = "4x2"', "4x2"),
    ("kv_shard", ["--kv-shard", "data"], 'kv-shard = "data"', "data"),
    ("expert_shard", ["--expert-shard", "all"], 'expert_shard = "all"', "all"),
    ("max_new_tokens", ["--max-new-tokens", "1"], "max-new-tokens = 1", 1),
    ("max_new_tokens", ["--max-new-tokens=9"], "max_new_tokens = 9", 9),
    ("min_new_tokens", ["--min-new-tokens", "128"], "min-new-tokens = 128", 128),
    ("stop", ["--stop", "\n", "--stop", "END"], 'stop = ["\\n", "END"]', ("\n", "END")),
    ("stop", ["--stop", " "], 'stop = " "', (" ",)),
    ("include_stop", ["--include-stop"], "include-stop = true", True),
    ("temperature", ["--temperature", "0.7"], "temperature = 0.7", 0.7),
    ("temperature", ["--temperature", "1"], "temperature = 1", 1.0),
    ("temperature", ["--temperature", "1e-3"], "temperature = 1e-3", 0.001),
    ("top_k", ["--top-k", "40"], "top-k = 40", 40),
    ("top_p", ["--top-p", ".9"], "top-p = 0.9", 0.9),
    ("min_p", ["--min-p", "0.05"], "min-p = 0.05", 0.05),
    ("seed", ["--seed", "4294967295"], "seed = 4294967295", 2**32 - 1),
    ("repetition_penalty", ["--repetition-penalty", "1.2"], "repetition-penalty = 1.2", 1.2),
    ("presence_penalty", ["--presence-penalty", "-2"], "presence-penalty = -2", -2.0),
    ("frequency_penalty", ["--frequency-penalty", "-0.5"], "frequency_penalty = -0.5", -0.5),
    ("num_speculative_tokens", ["--num-speculative-tokens", "0"], "num-speculative-tokens = 0", 0),
    ("num_speculative_tokens", ["--num-speculative-tokens=auto"], 'num-speculative-tokens = "auto"', "auto"),
    ("draft_method", ["--draft-method", "none"], 'draft-method = "none"', "none"),
    ("verify", ["--verify", "sparse"], 'verify = "sparse"', "sparse"),
    ("dtype", ["--dtype", "bfloat16"], 'dtype = "bfloat16"', "bfloat16"),
    ("implementation", ["--implementation", "xla"], 'implementation = "xla"', "xla"),
    ("max_model_len", ["--max-model-len", "2"], "max-model-len = 2", 2),
    ("max_batch_size", ["--max-batch-size", "4"], "max-batch-size = 4", 4),
    ("ignore_eos", ["--ignore-eos"], "ignore-eos = true", True),
    ("check_lossless", ["--check-lossless"], "check-lossless = true", True),
    ("logprobs", ["--logprobs", "20"], "logprobs = 20", 20),
    ("json", ["--json"], "json = true", True),
    ("stream", ["--no-stream"], "stream = false", False),
    ("cache_dir", ["--cache-dir", "d"], 'cache-dir = "d"', "d"),
    ("plan_only", ["--plan-only"], "plan-only = true", True),
    ("compile_check", ["--no-compile-check"], "compile-check = false", False),
    ("platform", ["--platform", "gpu:h200"], 'platform = "gpu:h200"', "gpu:h200"),
    ("batch_size", ["--batch-size", "4"], "batch-size = 4", 4),
]


def test_every_option_is_spelled_above():  # or, where it is for sparse verification, in test_sparsity_options
    assert {name for name, *_ in SPELLINGS} == set(OPTIONS) - set(SPARSE_ONLY)


@pytest.mark.parametrize("name, arguments, line, value", SPELLINGS)
def test_command_line_and_toml_give_the_same(name, arguments, line, value, toml):
    expected = dataclasses.replace(GenerateOptions(), **{name: value})
    for options in (parse_options(arguments), parse_options(["--config", toml(line)])):
        assert options == expected
        assert type(getattr(options, name)) is type(value)


def test_command_line_wins_over_toml_over_defaults(toml):
    path = toml('mesh = "4x2"\nstream = false\nmax-new-tokens = 5\nchat = true')
    options = parse_options(["--max-new-tokens", "6", "--config", path, "--no-chat"])
    assert (options.mesh, options.stream, options.max_new_tokens) == ("4x2", False, 6)
    assert options.chat is False
    assert options.num_speculative_tokens == 7


def test_sampling_params_are_those_of_the_options(toml):
    path = toml("temperature = 1\ntop-p = 0.5\nseed = 7")
    assert parse_options(["--config", path, "--seed", "8"]).sampling == SamplingParams(1.0, 0, 0.5, 0.0, 8)


def test_min_new_tokens_beyond_max_new_tokens(toml):
    path = toml("max-new-tokens = 5")
    assert parse_options(["--config", path, "--min-new-tokens", "5"]).min_new_tokens == 5
    with pytest.raises(UserError) as caught:
        parse_options(["--config", path, "--min-new-tokens", "6"])
    expected = "--min-new-tokens 6 is not allowed; allowed: at most --max-new-tokens, 5"
    assert str(caught.value) == expected


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
    (
        ["--num-speculative-tokens", "many"],
        "--num-speculative-tokens 'many' is not allowed; allowed: a whole number of at least 0, or auto",
    ),
    (["--temperature", "-0.1"], "--temperature -0.1 is not allowed; allowed: a finite number of at least 0"),
    (["--temperature", "nan"], "--temperature nan is not allowed"),
    (["--temperature", "inf"], "--temperature inf is not allowed"),
    (["--temperature", "hot"], "--temperature 'hot' is not allowed"),
    (["--top-k", "-1"], "--top-k -1 is not allowed; allowed: a whole number from 0 to 2147483647"),
    (["--top-k", "1.0"], "--top-k '1.0' is not allowed"),
    (["--top-p", "0"], "--top-p 0.0 is not allowed; allowed: a number above 0, up to 1"),
    (["--top-p", "1.1"], "--top-p 1.1 is not allowed"),
    (["--min-p", "1.1"], "--min-p 1.1 is not allowed; allowed: a number from 0 to 1"),
    (
        ["--seed", "4294967296"],
        "--seed 4294967296 is not allowed; allowed: a whole number from 0 to 4294967295",
    ),
    (["--seed", "-1"], "--seed -1 is not allowed"),
    (
        ["--repetition-penalty", "0"],
        "--repetition-penalty 0.0 is not allowed; allowed: a finite number above",
    ),
    (["--presence-penalty", "2.5"], "--presence-penalty 2.5 is not allowed; allowed: a number from -2 to 2"),
    (["--frequency-penalty", "-2.5"], "--frequency-penalty -2.5 is not allowed"),
    (["--logprobs", "21"], "--logprobs 21 is not allowed; allowed: a whole number from 0 to 20"),
    (["--stop", ""], "--stop '' is not allowed; allowed: Unicode text that is not empty, or a list"),
    (["--stop", "caf\udce9"], "--stop 'caf\\udce9' is not allowed"),
    (
        ["--min-new-tokens", "129"],
        "--min-new-tokens 129 is not allowed; allowed: at most --max-new-tokens, 128",
    ),
    (["--draft-method", "eagle"], "--draft-method 'eagle' is not allowed; allowed: prompt-lookup, none"),
    (
        ["--platform", "tpu:v4"],
        "--platform 'tpu:v4' is not allowed; allowed: tpu:v5e, tpu:v6e, tpu:v5p, gpu:h100, gpu:h200",
    ),
    (["--batch-size", "0"], "--batch-size 0 is not allowed; allowed: a whole number of at least 1"),
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
    ("temperature = true", "temperature = True is not allowed; allowed: a finite number of at least 0"),
    ("temperature = nan", "temperature = nan is not allowed"),
    ("temperature = -inf", "temperature = -inf is not allowed"),
    ("temperature = '1'", "temperature = '1' is not allowed"),
    ("temperature = [1]", "temperature = [1] is not allowed"),
    ("seed = 1.0", "seed = 1.0 is not allowed"),
    ("logprobs = -1", "logprobs = -1 is not allowed"),
    ("stop = ['a', '']", "stop = '' is not allowed"),
    ("num-speculative-tokens = 'AUTO'", "num-speculative-tokens = 'AUTO' is not allowed"),
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
