"""The command line with a published model. Few runs: each starts Python, JAX and a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COMMAND = [sys.executable, "-m", "sv_jax.generate"]
CPU = {**os.environ, "JAX_PLATFORMS": "cpu"}  # meshes are emulated, whatever accelerator is here


def run(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, cwd=ROOT, env=CPU, timeout=600, **options
    )


@pytest.mark.real
def test_real_default_prompts_on_an_emulated_mesh():
    arguments = ["--model", "smollm2-135m", "--mesh", "4x2", "--max-new-tokens", "8", "--json"]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    assert b"mesh 4x2 (data x model) of cpu devices" in done.stderr
    document = json.loads(done.stdout)
    assert len(document["outputs"]) == 4
    assert all(o["text"].strip() and len(o["token_ids"]) <= 8 for o in document["outputs"])
    stats = document["stats"]
    assert stats["emitted_tokens"] == sum(len(o["token_ids"]) for o in document["outputs"])
    assert 1 <= stats["mean_acceptance_length"] <= 8
    emitted = sum((i + 1) * count for i, count in enumerate(stats["acceptance_histogram"]))
    assert emitted == stats["emitted_tokens"] - 4  # each row's first token comes from its prefill


@pytest.mark.real
def test_real_prompts_from_stdin_are_lossless():
    prompts = "Count: 1 2 3 4 1 2 3 4 1 2\n\nSay 你好 👍 你好 👍\n"
    arguments = ["--prompt-file", "-", "--no-chat", "--max-new-tokens", "16", "--check-lossless"]
    done = run(*arguments, input=prompts.encode())
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, err
    headings = ["[1/2] > Count: 1 2 3 4 1 2 3 4 1 2\n", "[2/2] > Say 你好 👍 你好 👍\n"]
    assert [out.count(heading) for heading in headings] == [1, 1] and out.count("] = length\n") == 2
    assert "of 2 rows are identical" in err and err.rstrip().endswith("lossless")


@pytest.mark.real
def test_real_sampling_that_a_stop_string_ends():
    arguments = ["--temperature=0.7", "--top-p=0.9", "--seed=3", "--stop=7", "--logprobs=2", "--json"]
    done = run(*arguments, "--no-chat", "--max-new-tokens=24", "--prompt", "Count: 1 2 3 4 5 6 7 8 1 2 3 4")
    assert done.returncode == 0, done.stderr.decode()
    output = json.loads(done.stdout)["outputs"][0]
    assert output["finish_reason"] == "stop" and "7" not in output["text"]
    assert done.stderr.decode().count(output["text"]) == 1  # it was streamed there
    assert b"follows the law of plain sampling" in done.stderr
    assert [entry["token_id"] for entry in output["logprobs"]] == output["token_ids"]
    for entry in output["logprobs"]:
        assert len(entry["top"]) == 2 and entry["logprob"] <= entry["top"][0]["logprob"] <= 0


REAL_BAD = [
    (["--model", "smollm3"], "unknown model 'smollm3': known names are smollm2-135m"),
    (["--model", "x.bin"], "x.bin"),
    (["--mesh", "1x5"], "a model axis of 5 does not divide intermediate_size=1536; allowed: 1, 2, 3"),
    (["--max-model-len", "20", "--prompt", 30 * "long "], "has 6"),
    (["--verify=sparse", "--anchors=0,30"], "anchors has layer 30; allowed for this model: 0 to 29"),
]


@pytest.mark.real
@pytest.mark.parametrize("arguments, message", REAL_BAD)
def test_real_bad_input(arguments, message):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in done.stderr.decode() and "loading" not in done.stderr.decode()


@pytest.mark.real
def test_real_interrupt():
    arguments = ["--ignore-eos", "--max-new-tokens", "4000", "--prompt", "Tell me a long story."]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=CPU,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)  # the run streams
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err.decode()
    assert (first + out).decode().strip()
    assert b"interrupted" in err and b"tokens/s" in err and b"Traceback" not in err


@pytest.mark.real
def test_real_sparse_verification():
    """All of a context of some 300 tokens is read in blocks, then a part of it."""
    text = "Count: " + " ".join(str(i) for i in range(60)) + " and again: "
    arguments = ["--prompt", text, "--no-chat", "--max-new-tokens=12", "--block-size=16", "--json"]
    whole, part = (
        run(*arguments, "--verify=sparse", f"--keep={keep}", *more)
        for keep, more in [(1, ["--check-lossless"]), (0.1, [])]
    )
    assert whole.returncode == part.returncode == 0, (whole.stderr + part.stderr).decode()
    assert b"so the output equals plain greedy decoding" in whole.stderr
    assert whole.stderr.rstrip().endswith(b"lossless")
    assert b"10 % of the context" in part.stderr and b"which is lossy" in part.stderr
    reads = json.loads(part.stdout)["stats"]["sparse_attention"]
    assert reads["sparse_row_steps"] == reads["row_steps"] > 0
    assert 0 < reads["bytes_per_token"] < 0.5 * reads["dense_bytes_per_token"]
