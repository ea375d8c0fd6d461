"""A fake engine, and the command line run with it in this process or, without it, in another one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

from sv_jax import generate
from sv_jax.config import UserError
from sv_jax.engine import Divergence, LosslessReport, RequestOutput

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
    "sparse_attention": None,
    "sparse_ffn": None,
}
SPARSE = {  # in its place where the run was asked for sparsity
    "row_steps": 40,
    "sparse_row_steps": 30,
    "kv_blocks_per_token": 12.25,
    "dense_kv_blocks_per_token": 50.0,
    "bytes_per_token": 3.46e6,
    "summary_bytes_per_token": 0.2e6,
    "dense_bytes_per_token": 12.8e6,
}


class FakeRow:
    """The bytes of an answer, and how far it is told."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.done, self.shown = answer, 0, ""

    @property
    def ended(self) -> bool:
        return self.done == len(self.answer)

    def step(self) -> str:
        """Two more bytes; the whole characters that have come with them."""
        self.done = min(self.done + 2, len(self.answer))
        errors = "replace" if self.ended else "ignore"
        text = bytes(self.answer[: self.done]).decode(errors=errors)
        new, self.shown = text[len(self.shown) :], text
        return new


class FakeModel:
    """Answers each prompt with its text in capitals, a token a byte, two tokens per slice and row."""

    name, provenance, dtype, max_model_len = "fake", "fake, made up", "float32", 64

    def __init__(
        self,
        mesh,
        stop_after=None,
        lossless=True,
        stop_comparison=False,
        logprobs=None,
        sha256=None,
        sparse=None,
    ):
        self.sharding = SimpleNamespace(describe=lambda: f"mesh {mesh[0]}x{mesh[1]} of fake devices")
        self.calls: list[str] = []
        self.stop_after = stop_after  # slices, then SIGINT arrives
        self.lossless = lossless
        self.stop_comparison = stop_comparison
        self.logprobs = logprobs
        self.checkpoint = SimpleNamespace(sha256=sha256)
        self.sparse = sparse or {}  # changes to SPARSE
        self.arguments: dict = {}
        self.checked: dict = {}

    def encode_prompt(self, text, *, chat=None):
        self.calls.append("encode")
        return list(text.encode())

    def check_request(self, prompts, **settings):
        self.calls.append("check")
        self.checked = settings
        if too_long := [p for p in prompts if len(p) >= self.max_model_len]:
            raise UserError(f"prompt has {len(too_long[0])} tokens; allowed: {self.max_model_len - 1}")

    def describe_sparsity(self, sparsity):
        self.calls.append("describe")
        return [f"reads {sparsity.attention.budget}", "  of a fake"]

    def load_weights(self):
        self.calls.append("weights")

    def generate(self, prompts, *, on_text, should_stop, **arguments):
        self.calls.append("generate")
        self.arguments = arguments
        limit = arguments["max_new_tokens"]
        rows = [FakeRow(list(bytes(p).decode().upper().encode())[:limit]) for p in prompts]
        slices = 0
        while not all(row.ended for row in rows) and not should_stop():
            for index, row in enumerate(rows):
                if not row.ended:
                    text = row.step()
                    if on_text and (text or row.ended):
                        on_text(index, text, "length" if row.ended else None)
            slices += 1
            if slices == self.stop_after:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)  # the watching thread, not this one, is told
        outputs = [
            RequestOutput(
                len(prompt),
                row.answer[: row.done],
                bytes(row.answer[: row.done]).decode(errors="replace"),
                "length" if row.ended else "interrupted",
                self.logprobs,
            )
            for prompt, row in zip(prompts, rows)
        ]
        interrupted = any(o.finish_reason == "interrupted" for o in outputs)
        sparse = None if arguments["sparsity"] is None else SPARSE | self.sparse
        stats = SimpleNamespace(as_dict=lambda: STATS | {"sparse_attention": sparse})
        return SimpleNamespace(outputs=outputs, stats=stats, interrupted=interrupted)

    def compare_with_plain(self, result, prompts, *, should_stop):
        self.calls.append("compare")
        if self.stop_comparison:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        gap = 2e-4 if self.lossless else 0.5
        divergences = [Divergence(0, 3, 65, 66, gap)]
        return LosslessReport(rows=len(prompts), divergences=divergences, interrupted=should_stop())


def run(capsys, *arguments):
    code = generate.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def python(code_or_arguments, **options):
    arguments = ["-c", code_or_arguments] if isinstance(code_or_arguments, str) else code_or_arguments
    return subprocess.run([sys.executable, *arguments], capture_output=True, cwd=ROOT, timeout=600, **options)
