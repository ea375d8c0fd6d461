"""Command line: prompts in, speculatively decoded text and a summary out.

    python -m sv_jax.generate --prompt "Why is the sky blue?" --mesh 4x2

JAX is imported only after options, mesh and prompts are known to be good: mistakes get their answer at once,
and the emulated devices have to be asked for before JAX starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sv_jax.builtin_prompts import BUILTIN_PROMPTS
from sv_jax.config import UserError
from sv_jax.interrupts import INTERRUPTED, deferred_interrupts
from sv_jax.options import GenerateOptions, flag, parse_options
from sv_jax.summary import jsonable, lossless_lines, summary_lines

if TYPE_CHECKING:
    from sv_jax.engine import GenerationResult, LanguageModel, LosslessReport
    from sv_jax.engine import RequestOutput as Output

USER_ERROR, NOT_LOSSLESS, BROKEN_PIPE = 2, 1, 141
TAG_WIDTH = 60


def say(text: str) -> None:
    """To standard error, after what standard output has so far: in a terminal the two are one text."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def load_model(model: str, **options: Any) -> LanguageModel:
    from sv_jax.engine import load_model as load

    return load(model, **options)


def read_prompts(options: GenerateOptions) -> tuple[str, ...]:
    """The prompts of the options, else the built-in ones. Raises UserError for a file without any."""
    if options.prompt_file is not None:
        return _read_prompt_file(options.prompt_file)
    return options.prompt or BUILTIN_PROMPTS


def _read_prompt_file(name: str) -> tuple[str, ...]:
    label = f"{flag('prompt_file')} {name!r}"
    try:
        if name == "-" and sys.stdin.isatty():
            say("reading prompts from standard input, one a line; Ctrl-D ends them")
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{label}: {error.strerror}; allowed: a readable text file, or - ") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{label} is not UTF-8 text (byte {error.start} is {data[error.start]:#x})"
        ) from error
    # Only newlines separate: splitlines() would also cut at U+2028 and form feeds inside of a prompt.
    prompts = tuple(line.removesuffix("\r") for line in text.split("\n") if line.strip())
    if not prompts:
        raise UserError(f"{label} has no prompts; allowed: one prompt a line, of lines that are not blank")
    return prompts


class TextPrinter:
    """Prints generated text: a lone row while it grows, several rows each in one piece when it ends."""

    def __init__(self, prompts: Sequence[str], tokenizer: Any, out: TextIO) -> None:
        from sv_jax.engine.text_stream import TextStream

        self._prompts = prompts
        self._tokenizer = tokenizer
        self._out = out
        self._live = TextStream(tokenizer) if len(prompts) == 1 else None
        self._line_open = False
        self._tokens: dict[int, list[int]] = {row: [] for row in range(len(prompts))}  # rows not yet ended

    def on_tokens(self, row: int, token_ids: list[int], finish_reason: str | None) -> None:
        """The engine's callback, between slices of steps."""
        if finish_reason == "stop":
            token_ids = token_ids[:-1]  # the end token is no text
        if self._live is not None:
            self._write(self._live.push(token_ids))
        self._tokens[row] += token_ids
        if finish_reason is not None:
            self._end_row(row, self._tokenizer.decode(self._tokens[row]), finish_reason)

    def finish(self, outputs: Sequence[Output]) -> None:
        """Prints what no callback has printed: rows that were interrupted, or all without streaming."""
        for row in list(self._tokens):
            self._end_row(row, outputs[row].text, outputs[row].finish_reason)

    def _end_row(self, row: int, text: str, finish_reason: str) -> None:
        tokens = self._tokens.pop(row)
        if self._live is None:
            self._write(
                f"[{row + 1}/{len(self._prompts)}] {beginning(self._prompts[row])} ({finish_reason})\n"
            )
            self._write(text)
        else:
            self._write(self._live.finish() if tokens else text)
        if self._line_open:
            self._write("\n")
        if self._live is None:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._line_open = not text.endswith("\n")


def beginning(prompt: str) -> str:
    """The start of a prompt, on one line."""
    line = " ".join(prompt.split())
    return line if len(line) <= TAG_WIDTH else line[: TAG_WIDTH - 1].rstrip() + "…"


def prepare(
    options: GenerateOptions, mesh: tuple[int, int], prompts: Sequence[str]
) -> tuple[LanguageModel, list[list[int]]]:
    """The model with its weights, and the prompts' token ids. Bad requests are refused before the weights."""
    from sv_jax import sharding

    sharding.ensure_devices(mesh[0] * mesh[1])
    model = load_model(
        options.model,
        mesh=mesh,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        cache_directory=Path(options.cache_dir).expanduser() if options.cache_dir else None,
        notify=say,
        lazy=True,
    )
    say(model.provenance)
    say(f"{model.sharding.describe()}; {model.dtype}, context of {model.max_model_len} tokens")
    encoded = [model.encode_prompt(prompt, chat=options.chat) for prompt in prompts]
    model.check_request(
        encoded,
        max_new_tokens=options.max_new_tokens,
        num_speculative_tokens=options.num_speculative_tokens,
        draft_method=options.draft_method,
    )
    warn_about_idle_devices(mesh, len(prompts))
    model.load_weights()
    return model, encoded


def warn_about_idle_devices(mesh: tuple[int, int], rows: int) -> None:
    data, model = mesh
    if rows < data:
        idle = (data - rows) * model
        noun = "prompt" if rows == 1 else "prompts"
        say(f"{rows} {noun} for a data axis of {data}: {idle} of {data * model} devices are idle")


def decode(
    options: GenerateOptions, model: LanguageModel, prompts: Sequence[str], encoded: list[list[int]]
) -> GenerationResult:
    """Generates, printing text as the options say; the first Ctrl-C ends it with what there is."""
    printer = None
    if options.stream or not options.json:
        printer = TextPrinter(prompts, model.tokenizer, sys.stderr if options.json else sys.stdout)
    with deferred_interrupts() as interrupted:
        result = model.generate(
            encoded,
            max_new_tokens=options.max_new_tokens,
            num_speculative_tokens=options.num_speculative_tokens,
            draft_method=options.draft_method,
            ignore_eos=options.ignore_eos,
            max_batch_size=options.max_batch_size,
            on_tokens=printer.on_tokens if printer and options.stream else None,
            should_stop=interrupted,
        )
    if printer:
        printer.finish(result.outputs)
    return result


def compare(
    options: GenerateOptions, model: LanguageModel, result: GenerationResult, encoded: list[list[int]]
) -> LosslessReport:
    with deferred_interrupts() as interrupted:
        report = model.compare_with_plain(
            result,
            encoded,
            max_new_tokens=options.max_new_tokens,
            ignore_eos=options.ignore_eos,
            max_batch_size=options.max_batch_size,
            should_stop=interrupted,
        )
    say("\n".join(lossless_lines(report)))
    return report


def json_line(result: GenerationResult, report: LosslessReport | None) -> str:
    """One line that every JSON reader takes: ASCII (so no stray line separators), no NaN."""
    fields = ("prompt_tokens", "token_ids", "text", "finish_reason")
    document: dict[str, Any] = {
        "outputs": [{name: getattr(output, name) for name in fields} for output in result.outputs],
        "stats": result.stats.as_dict(),
    }
    if report is not None:
        document["lossless"] = {
            "lossless": report.lossless,
            "identical_rows": report.identical_rows,
            "rows": report.rows,
            "interrupted": report.interrupted,
            "divergences": [dataclasses.asdict(d) for d in report.divergences],
        }
    return json.dumps(jsonable(document), allow_nan=False)


def run(options: GenerateOptions) -> int:
    """One run of the command line. Returns the exit code."""
    prompts = read_prompts(options)
    from sv_jax.sharding import parse_mesh

    model, encoded = prepare(options, parse_mesh(options.mesh), prompts)
    result = decode(options, model, prompts, encoded)
    say("\n".join(summary_lines(result.stats.as_dict(), len(prompts))))
    code, report = 0, None
    if result.interrupted:
        code = INTERRUPTED
    elif options.check_lossless:
        report = compare(options, model, result, encoded)
        code = INTERRUPTED if report.interrupted else 0 if report.lossless else NOT_LOSSLESS
    if options.json:
        print(json_line(result, report), flush=True)
    return code


def _tolerate_narrow_encodings() -> None:
    """A terminal that cannot show a character shows a question mark; it does not end the run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_stdout() -> None:
    """What is still buffered for a reader that has gone must not be flushed when Python exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    _tolerate_narrow_encodings()
    try:
        return run(parse_options(arguments))
    except UserError as error:
        # One line, also where a message quotes a library that writes several.
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    # Shells start background jobs with SIGINT ignored; one that is sent on purpose still counts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
