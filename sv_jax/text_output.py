"""Generated text for a person: a lone row as it grows, several side by side, or each in one piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:  # importing the engine imports JAX, which --help must not wait for
    from sv_jax.engine import RequestOutput as Output

BEGINNING_WIDTH = 60
# A row's text is written by the line: its own, or when so much has come, or after so long.
LINE_WIDTH, LINE_SECONDS = 64, 4.0
PROMPT, LINE, MORE, END = ">", "|", "+", "="
MARKS = (
    f"Several prompts are written side by side as their texts grow. [2/4] is the second of four; behind it, "
    f"{PROMPT} is the prompt, {LINE} begins a line of the text, {MORE} goes on with that line, "
    f"{END} says how the text ended."
)


class LivePrinter(Protocol):
    """Takes text from the engine while it is generated."""

    def on_text(self, row: int, text: str, finish_reason: str | None) -> None:
        """The engine's callback: new text of a row, and how the row ended in its last call."""

    def finish(self, outputs: Sequence[Output]) -> None:
        """Prints what no callback has brought: the ends of rows that were interrupted."""


def live_printer(
    prompts: Sequence[str], out: TextIO, clock: Callable[[], float] = time.monotonic
) -> LivePrinter:
    return SingleRow(out) if len(prompts) == 1 else TaggedRows(prompts, out, clock)


class SingleRow:
    """The text and nothing else, as it comes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = 0
        self._line_open = False
        self._ended = False

    def on_text(self, row: int, text: str, finish_reason: str | None) -> None:
        self._shown += len(text)
        self._write(text)
        if finish_reason is not None:
            self._ended = True
            self._write("\n" if self._line_open else "")

    def finish(self, outputs: Sequence[Output]) -> None:
        if not self._ended:
            self.on_text(0, outputs[0].text[self._shown :], outputs[0].finish_reason)

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._line_open = not text.endswith("\n")


class TaggedRows:
    """Rows side by side: every written line says whose it is, and MARKS what it is.

        [2/4] > Repeat the following passage word for word: "Four score and…
        [2/4] | Four score and seven years ago our
        [1/4] > Add a docstring to each function, change nothing else, and…
        [1/4] | def mean(values):
        [1/4] |     return sum(values) / len(values)
        [2/4] + fathers brought forth upon this continent
        [2/4] = length

    A row's text is what stands behind its marks LINE and MORE, with a line break before each LINE but the
    first. Text waits for a line's worth, or LINE_SECONDS, and what is behind its last space a little longer:
    the engine brings a few tokens at a time, and lines of one or two words are hard to read.
    """

    def __init__(self, prompts: Sequence[str], out: TextIO, clock: Callable[[], float]) -> None:
        self._out = out
        self._clock = clock
        self._rows = [_TaggedRow(f"[{i + 1}/{len(prompts)}]", prompt) for i, prompt in enumerate(prompts)]

    def on_text(self, row: int, text: str, finish_reason: str | None) -> None:
        lines = self._rows[row].push(text, self._clock())
        if finish_reason is not None:
            lines += self._rows[row].end(finish_reason)
        self._write(lines)

    def finish(self, outputs: Sequence[Output]) -> None:
        for row, output in zip(self._rows, outputs):
            if not row.ended:
                lines = row.push(output.text[row.received :], self._clock())
                self._write(lines + row.end(output.finish_reason))

    def _write(self, lines: Sequence[str]) -> None:
        if lines:
            self._out.write("".join(line + "\n" for line in lines))
            self._out.flush()


class _TaggedRow:
    """What one row still has to write."""

    def __init__(self, tag: str, prompt: str) -> None:
        self._tag = tag
        self._prompt: str | None = prompt  # until it is written
        self._mark = LINE  # of the next line
        self._waiting = ""
        self._written = 0.0  # when a line was
        self.received = 0
        self.ended = False

    def push(self, text: str, now: float) -> list[str]:
        """Lines to write at `now`, when `text` has come."""
        if not text:
            return []
        self.received += len(text)
        self._waiting += text
        lines = self._heading()
        if lines:
            self._written = now
        ready = self._waiting.rfind("\n") + 1
        if len(self._waiting) - ready >= LINE_WIDTH or now - self._written >= LINE_SECONDS:
            ready = max(ready, self._waiting.rfind(" ", 1) + 1) or len(self._waiting)
        if ready:
            self._written = now
        lines += self._tagged(self._waiting[:ready])
        self._waiting = self._waiting[ready:]
        return lines

    def end(self, finish_reason: str) -> list[str]:
        """The row's last lines."""
        lines = self._heading() + self._tagged(self._waiting)
        if self._mark == LINE and self.received:  # a text that ends with a line break has an empty last line
            lines.append(f"{self._tag} {LINE} ")
        self._waiting, self.ended = "", True
        return [*lines, f"{self._tag} {END} {finish_reason}"]

    def _tagged(self, text: str) -> list[str]:
        *whole, last = text.split("\n")  # and at nothing else: other separators are text
        lines = []
        for line in whole:
            if line or self._mark == LINE:
                lines.append(f"{self._tag} {self._mark} {line}")
            self._mark = LINE
        if last:
            lines.append(f"{self._tag} {self._mark} {last}")
            self._mark = MORE
        return lines

    def _heading(self) -> list[str]:
        """The line of the prompt, once."""
        prompt, self._prompt = self._prompt, None
        return [] if prompt is None else [f"{self._tag} {PROMPT} {beginning(prompt)}"]


def print_rows(prompts: Sequence[str], outputs: Sequence[Output], out: TextIO) -> None:
    """Each row in one piece, in order; a lone one without a heading."""
    for row, (prompt, output) in enumerate(zip(prompts, outputs)):
        several = len(prompts) > 1
        heading = f"[{row + 1}/{len(prompts)}] {beginning(prompt)} ({output.finish_reason})\n"
        line_end = "\n" if output.text and not output.text.endswith("\n") else ""
        out.write((heading if several else "") + output.text + line_end + ("\n" if several else ""))
    out.flush()


def beginning(prompt: str) -> str:
    """The start of a prompt, on one line."""
    line = " ".join(prompt.split())
    return line if len(line) <= BEGINNING_WIDTH else line[: BEGINNING_WIDTH - 1].rstrip() + "…"
