"""The command line: what it prints where, and how it ends. With a fake engine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from sv_jax import generate
from sv_jax.builtin_prompts import BUILTIN_PROMPTS
from sv_jax.config import Cuts, UserError
from sv_jax.engine import TokenLogprob
from sv_jax.option_table import flag
from sv_jax.sampling_params import SamplingParams
from tests.fake_engine import ROOT, STATS, FakeModel, python, run

SAMPLING = {
    # arguments: the line that tells of them, the law of the text
    (): (None, "equals plain greedy decoding"),
    ("--seed=3",): ("greedy", "equals plain greedy decoding"),
    ("--presence-penalty=.25",): ("greedy, presence-penalty 0.25", "equals plain greedy decoding"),
    ("--temperature=1",): ("temperature 1, seed 0", "follows the law of plain sampling"),
    ("--temperature=0.7", "--top-k=2000000", "--seed=4294967295"): (
        "temperature 0.7, top-k 2000000, seed 4294967295",
        "follows the law of plain sampling",
    ),
}


@pytest.mark.parametrize("arguments", SAMPLING)
def test_summary_of_sampling(arguments, fake, capsys):
    err = run(capsys, "--prompt", "one", *arguments)[2]
    settings, law = SAMPLING[arguments]
    told = [line.removeprefix("sampling").strip() for line in err.splitlines() if line.startswith("sampling")]
    assert told == ([settings] if settings else [])
    assert err.splitlines()[-1].startswith("verification was dense (every cached position was read), so")
    assert law in err.splitlines()[-1]


def test_summary(fake, capsys):
    _, _, err = run(capsys, "--prompt", "one")
    for part in [
        "9 in 1 row", "61.2 tokens/s", "(TTFT) 0.51 s", "(TPOT) 16.3 ms", "2.33 tokens per row and step",
        "41 % of drafted tokens accepted; 63 % of row-steps had a draft", "4 verify steps, 1 of them",
        "compile 1.5 s", "verification was dense",
    ]:  # fmt: skip
        assert part in err
    bars = [line.split() for line in err.splitlines() if "#" in line]
    assert [(bar[0], bar[2]) for bar in bars] == [("1", "3"), ("3", "1")]
    assert len(bars[0][1]) == 40 and len(bars[1][1]) == 14


@pytest.mark.parametrize("prompts", [["one\u2028line"], ["one", "two"]])
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_json_is_all_of_stdout(prompts, stream, fake, capsys):
    arguments = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    code, out, err = run(capsys, "--json", stream, *arguments)
    assert code == 0 and len(out.splitlines()) == 1
    document = json.loads(out)
    assert [o["text"] for o in document["outputs"]] == [prompt.upper() for prompt in prompts]
    first = document["outputs"][0]
    assert list(first) == ["prompt_tokens", "token_ids", "text", "finish_reason"]
    assert bytes(first["token_ids"]).decode() == prompts[0].upper()
    assert document["stats"] == {**STATS, "load_seconds": None}  # JSON has no NaN
    assert (prompts[0].upper() in err) == (stream == "--stream")
    assert "tokens/s" in err


def test_options_reach_the_engine(fake, capsys, tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('mesh = "2x1"\nmax-batch-size = 3\ncache-dir = "somewhere"')
    arguments = ["--model=m", "--dtype=bfloat16", "--max-model-len=50", "--draft-method=none", "--ignore-eos"]
    arguments += ["--implementation=xla", "--kv-shard=data", "--expert-shard=all"]
    arguments += ["--config", str(path), "--prompt", "abcdef", "--max-new-tokens=3"]
    code, out, _ = run(capsys, *arguments)
    assert (code, out) == (0, "ABC\n")
    model = fake.loaded[0]
    assert model.options.pop("notify")
    assert model.options.pop("cache_directory").name == "somewhere"
    assert model.options.pop("cuts") == Cuts(kv_shard="data", expert_shard="all")
    own = {"dtype": "bfloat16", "max_model_len": 50, "implementation": "xla"}
    assert model.options == {"model": "m"} | own
    assert model.arguments == model.checked
    assert model.arguments == {
        "max_new_tokens": 3,
        "min_new_tokens": 0,
        "num_speculative_tokens": 7,
        "draft_method": "none",
        "sampling": SamplingParams(),
        "stop": (),
        "include_stop": False,
        "ignore_eos": True,
        "logprobs": 0,
        "max_batch_size": 3,
        "sparsity": None,
    }


def test_ways_to_choose_and_to_end_reach_the_engine(fake, capsys):
    sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 4}
    sampling |= {"repetition_penalty": 1.1, "presence_penalty": -1.5, "frequency_penalty": 2.0}
    arguments = [f"{flag(name)}={value}" for name, value in sampling.items()]
    arguments += ["--stop", "\n", "--stop=END", "--include-stop", "--min-new-tokens=2", "--logprobs=3"]
    code, _, _ = run(capsys, *arguments, "--num-speculative-tokens=auto", "--prompt", "abc")
    got = fake.loaded[0].arguments
    assert code == 0 and got == fake.loaded[0].checked
    assert got["sampling"] == SamplingParams(**sampling)
    assert (got["stop"], got["include_stop"], got["min_new_tokens"]) == (("\n", "END"), True, 2)
    assert (got["logprobs"], got["num_speculative_tokens"]) == (3, "auto")


def test_logprobs_in_json(fake, capsys):
    fake.configure(logprobs=[TokenLogprob(65, -0.5, [(65, -0.5), (66, float("-inf"))])])
    code, out, _ = run(capsys, "--json", "--logprobs=2", "--prompt", "a")
    top = [{"token_id": 65, "logprob": -0.5}, {"token_id": 66, "logprob": None}]  # JSON has no infinity
    expected = [{"token_id": 65, "logprob": -0.5, "top": top}]
    assert code == 0 and json.loads(out)["outputs"][0]["logprobs"] == expected


def test_without_a_prompt_there_are_four(fake, capsys, monkeypatch):
    monkeypatch.setattr(FakeModel, "max_model_len", 1 << 20)
    code, out, _ = run(capsys, "--no-stream", "--max-new-tokens", "5", "--mesh", "4x2")
    assert code == 0 and len(BUILTIN_PROMPTS) == 4
    assert [line[:5] for line in out.splitlines() if line.startswith("[")] == [
        f"[{i}/4]" for i in range(1, 5)
    ]


def test_a_small_batch_says_that_devices_idle(fake, capsys):
    err = run(capsys, "--prompt", "one", "--mesh", "4x2")[2]
    assert "1 prompt for a data axis of 4: 6 of 8 devices are idle" in err
    assert "idle" not in run(capsys, "--prompt", "one")[2]


PROMPT_FILES = [
    (b"one\ntwo\n", ["one", "two"]),
    (
        b"\xef\xbb\xbfone\r\n\r\n  \ntwo",
        ["one", "two"],
    ),  # BOM, Windows line ends, blank lines, no last newline
    ("a\u2028b\fc\n".encode(), ["a\u2028b\fc"]),  # separators that are no newlines
    (b"  indented \n", ["  indented "]),
]


@pytest.mark.parametrize("data, expected", PROMPT_FILES)
@pytest.mark.parametrize("stdin", [False, True])
def test_prompt_file(data, expected, stdin, fake, capsys, tmp_path, monkeypatch):
    path = tmp_path / "prompts.txt"
    path.write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    code, out, _ = run(capsys, "--json", "--prompt-file", "-" if stdin else str(path))
    assert code == 0
    assert [o["text"] for o in json.loads(out)["outputs"]] == [text.upper() for text in expected]


BAD = [
    (["--max-new-tokens", "0"], "--max-new-tokens 0 is not allowed"),
    (["--prompt", "  "], "--prompt '  ' is not allowed"),
    (["--mesh", "4"], "--mesh '4' is not DATAxMODEL"),
    (["--mesh", "0x2"], "--mesh '0x2' is not DATAxMODEL"),
    (["--config", "missing.toml"], "--config 'missing.toml': No such file"),
    (["--prompt-file", "missing.txt"], "--prompt-file 'missing.txt': No such file"),
    (["--prompt-file", "."], "--prompt-file '.': Is a directory"),
    (["--prompt-file", os.devnull], "has no prompts; allowed: one prompt a line"),
    (["--unknown"], "unrecognized arguments: --unknown"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_is_one_line_before_the_model(arguments, message, fake, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, out, fake.loaded) == (2, "", [])
    assert err.startswith("error: ") and message in err
    assert err.count("\n") == 1


def test_prompt_file_that_is_not_text(fake, capsys, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"ok\n\xff\xfe")
    code, _, err = run(capsys, "--prompt-file", str(path))
    assert code == 2 and "is not UTF-8 text (byte 3 is 0xff)" in err


def test_a_bad_request_is_refused_before_the_weights(fake, capsys):
    code, out, err = run(capsys, "--prompt", "x" * 64)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "error: prompt has 64 tokens; allowed: 63"
    assert fake.loaded[0].calls == ["encode", "check"]


def test_errors_are_one_line_even_if_a_library_wrote_several(monkeypatch, capsys):
    def refuse(options):
        raise UserError("bad\nvalue\r\nhere")

    monkeypatch.setattr(generate, "run", refuse)
    assert run(capsys)[2] == "error: bad value here\n"


@pytest.mark.parametrize("lossless, code", [(True, 0), (False, 1)])
def test_check_lossless(lossless, code, fake, capsys):
    fake.configure(lossless=lossless)
    got, out, err = run(capsys, "--prompt", "one", "--check-lossless", "--json")
    assert got == code
    assert "0 of 1 rows are identical" in err
    assert "row 1 differs at output token 3: speculative 65, plain 66, top-2 gap" in err
    report = json.loads(out)["lossless"]
    assert report["lossless"] is lossless and report["divergences"][0]["index"] == 3


def test_help_does_not_import_jax():
    code = "import sys, sv_jax.generate; sys.exit('jax' in sys.modules or 'tokenizers' in sys.modules)"
    assert python(code).returncode == 0
    done = python(["-m", "sv_jax.generate", "--help"])
    assert done.returncode == 0 and b"--check-lossless" in done.stdout


BROKEN_PIPE = """if True:
    import sys
    from types import SimpleNamespace
    from sv_jax import generate
    def run(options):
        for i in range(100000):
            print("a line", i, flush=True)
    generate.run = run
    sys.exit(generate.main([]))
"""


def test_a_reader_that_leaves_early_ends_the_run_quietly():
    process = subprocess.Popen(
        [sys.executable, "-c", BROKEN_PIPE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141
    process.stderr.close()
