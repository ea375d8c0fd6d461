"""The command line: what it prints where, and how it ends. With a fake engine."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from sv_jax import generate, sharding
from sv_jax.builtin_prompts import BUILTIN_PROMPTS
from sv_jax.config import UserError
from sv_jax.interrupts import deferred_interrupts

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STATS = {
    "emitted_tokens": 9,
    "tokens_per_second": 61.25,
    "ttft_seconds": 0.512,
    "tpot_seconds": 0.0163,
    "mean_acceptance_length": 2.3333,
    "acceptance_histogram": [3, 0, 1],
    "draft_acceptance_rate": 0.41,
    "draft_coverage": 0.63,
    "verify_steps": 4,
    "plain_steps": 1,
    "compile_seconds": 1.5,
    "load_seconds": float("nan"),
}


class ByteTokenizer:
    def decode(self, token_ids):
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")


class FakeModel:
    """Answers each prompt with its text in capitals, a token a byte, two tokens per slice and row."""

    name, provenance, dtype, max_model_len = "fake", "fake, made up", "float32", 64
    tokenizer = ByteTokenizer()

    def __init__(self, mesh, stop_after=None, lossless=True, stop_comparison=False):
        self.sharding = SimpleNamespace(describe=lambda: f"mesh {mesh[0]}x{mesh[1]} of fake devices")
        self.calls: list[str] = []
        self.stop_after = stop_after  # slices, then SIGINT arrives
        self.lossless = lossless
        self.stop_comparison = stop_comparison
        self.arguments: dict = {}

    def encode_prompt(self, text, *, chat=None):
        self.calls.append("encode")
        return list(text.encode())

    def check_request(self, prompts, *, max_new_tokens, num_speculative_tokens, draft_method):
        self.calls.append("check")
        if too_long := [p for p in prompts if len(p) >= self.max_model_len]:
            raise UserError(f"prompt has {len(too_long[0])} tokens; allowed: {self.max_model_len - 1}")

    def load_weights(self):
        self.calls.append("weights")

    def generate(self, prompts, *, on_tokens, should_stop, max_new_tokens, **arguments):
        self.calls.append("generate")
        self.arguments = arguments
        answers = [list(bytes(p).decode().upper().encode())[:max_new_tokens] for p in prompts]
        done = [0] * len(prompts)
        slices = 0
        while any(d < len(a) for d, a in zip(done, answers)) and not should_stop():
            for row, answer in enumerate(answers):
                new = answer[done[row] : done[row] + 2]
                done[row] += len(new)
                if on_tokens and new:
                    on_tokens(row, new, "length" if done[row] == len(answer) else None)
            slices += 1
            if slices == self.stop_after:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)  # the watching thread, not this one, is told
        outputs = [
            SimpleNamespace(
                prompt_tokens=len(prompt),
                token_ids=answer[:d],
                text=self.tokenizer.decode(answer[:d]),
                finish_reason="length" if d == len(answer) else "interrupted",
            )
            for prompt, answer, d in zip(prompts, answers, done)
        ]
        interrupted = any(o.finish_reason == "interrupted" for o in outputs)
        stats = SimpleNamespace(as_dict=lambda: STATS)
        return SimpleNamespace(outputs=outputs, stats=stats, interrupted=interrupted)

    def compare_with_plain(self, result, prompts, *, max_new_tokens, ignore_eos, max_batch_size, should_stop):
        self.calls.append("compare")
        if self.stop_comparison:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        from sv_jax.engine import Divergence, LosslessReport

        gap = 2e-4 if self.lossless else 0.5
        divergences = [Divergence(0, 3, 65, 66, gap)]
        return LosslessReport(rows=len(prompts), divergences=divergences, interrupted=should_stop())


@pytest.fixture
def fake(monkeypatch):
    """Puts a fake engine into the command line; `fake(...)` configures the model that it loads."""
    settings: dict = {}
    loaded: list[FakeModel] = []
    asked: list[int] = []

    def load_model(name, *, mesh, lazy, **options):
        assert lazy and asked.pop() == mesh[0] * mesh[1], "devices before the model, weights after the checks"
        loaded.append(FakeModel(mesh, **settings))
        loaded[-1].options = {"model": name, **options}
        return loaded[-1]

    monkeypatch.setattr(generate, "load_model", load_model)
    monkeypatch.setattr(sharding, "ensure_devices", asked.append)
    return SimpleNamespace(configure=settings.update, loaded=loaded, asked=asked)


def run(capsys, *arguments):
    code = generate.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_row_is_live_text_and_nothing_else(fake, capsys):
    code, out, err = run(capsys, "--prompt", "größe 👍")
    assert (code, out) == (0, "GRÖSSE 👍\n")
    assert "fake, made up" in err and "mesh 1x1 of fake devices" in err
    assert fake.loaded[0].calls == ["encode", "check", "weights", "generate"]


def test_live_text_arrives_in_pieces(fake, monkeypatch):
    pieces = []

    class Out(io.StringIO):
        def write(self, text):
            pieces.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Out())
    assert generate.main(["--prompt", "a👍bcd"]) == 0
    assert pieces == ["A", "👍B", "CD", "\n"]


def test_several_rows_are_printed_whole_as_they_end(fake, capsys):
    code, out, _ = run(capsys, "--prompt", "a longer prompt", "--prompt", "two\nlines")
    assert code == 0
    assert (
        out == "[2/2] two lines (length)\nTWO\nLINES\n\n[1/2] a longer prompt (length)\nA LONGER PROMPT\n\n"
    )


def test_no_stream_prints_in_order_at_the_end(fake, capsys):
    _, out, _ = run(capsys, "--prompt", "a longer prompt", "--prompt", "two", "--no-stream")
    assert out == "[1/2] a longer prompt (length)\nA LONGER PROMPT\n\n[2/2] two (length)\nTWO\n\n"
    assert run(capsys, "--prompt", "one", "--no-stream")[1] == "ONE\n"


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
    arguments += ["--config", str(path), "--prompt", "abcdef", "--max-new-tokens=3"]
    code, out, _ = run(capsys, *arguments)
    assert (code, out) == (0, "ABC\n")
    model = fake.loaded[0]
    assert model.options.pop("notify")
    assert model.options.pop("cache_directory").name == "somewhere"
    assert model.options == {"model": "m", "dtype": "bfloat16", "max_model_len": 50}
    assert model.arguments == {
        "num_speculative_tokens": 7,
        "draft_method": "none",
        "ignore_eos": True,
        "max_batch_size": 3,
    }


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


def test_interrupted_comparison_still_gives_the_output(fake, capsys):
    fake.configure(stop_comparison=True)
    code, out, err = run(capsys, "--prompt", "one", "--check-lossless", "--json")
    assert code == 130 and "interrupted" in err
    document = json.loads(out)
    assert document["outputs"][0]["text"] == "ONE" and document["lossless"]["interrupted"]


def test_interrupt_gives_what_there_is(fake, capsys):
    fake.configure(stop_after=2)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = run(capsys, "--prompt", "abc👍", "--check-lossless")
    assert (code, out) == (130, "ABC\N{REPLACEMENT CHARACTER}\n")
    assert "interrupted: ending after the running steps" in err and "verification was dense" in err
    assert "compare" not in fake.loaded[0].calls
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_with_several_rows_and_json(fake, capsys):
    fake.configure(stop_after=1)
    code, out, _ = run(capsys, "--prompt", "a longer one", "--prompt", "ab", "--json")
    outputs = json.loads(out)["outputs"]
    assert code == 130
    assert [(o["text"], o["finish_reason"]) for o in outputs] == [("A ", "interrupted"), ("AB", "length")]
    _, out, _ = run(capsys, "--prompt", "a longer one", "--prompt", "ab")
    assert out == "[2/2] ab (length)\nAB\n\n[1/2] a longer one (interrupted)\nA \n\n"


def test_interrupt_while_loading(fake, capsys, monkeypatch):
    monkeypatch.setattr(FakeModel, "load_weights", lambda self: os.kill(os.getpid(), signal.SIGINT))
    code, out, err = run(capsys, "--prompt", "one")
    assert (code, out) == (130, "") and err.endswith("interrupted\n")


def test_interrupts_outside_of_the_main_thread():
    seen = []

    def work():
        with deferred_interrupts() as interrupted:
            seen.append(interrupted())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def python(code_or_arguments, **options):
    arguments = ["-c", code_or_arguments] if isinstance(code_or_arguments, str) else code_or_arguments
    return subprocess.run([sys.executable, *arguments], capture_output=True, cwd=ROOT, timeout=600, **options)


def test_a_second_interrupt_ends_a_long_call_at_once():
    # time.sleep stands for a long call into XLA; the handler returns, so the sleep goes on.
    code = """if True:
        import os, signal, threading, time
        from sv_jax.interrupts import deferred_interrupts
        kill = lambda: os.kill(os.getpid(), signal.SIGINT)
        with deferred_interrupts():
            threading.Timer(0.2, kill).start()
            threading.Timer(0.6, kill).start()
            time.sleep(60)
    """
    started = time.monotonic()
    done = python(code)
    assert done.returncode == 130 and time.monotonic() - started < 30
    assert done.stderr.count(b"once more ends at once") == 1


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
