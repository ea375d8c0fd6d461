"""Text on the terminal: live, tagged or in one piece. With a fake engine."""

from __future__ import annotations

import io
import itertools
import json
import random
import sys

import pytest

from sv_jax import generate
from sv_jax.engine import RequestOutput
from sv_jax.text_output import LINE_SECONDS, live_printer
from tests.fake_engine import run


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


def rebuilt(written: str) -> dict[str, str]:
    """Each row's text, from the tagged lines alone; and every line is of one of the four kinds."""
    lines: dict[str, list[str]] = {}
    assert written == "" or written.endswith("\n")
    for line in written.split("\n")[:-1]:
        tag, mark, content = line[:5], line[6], line[8:]
        assert line[5] == line[7] == " " and mark in ">|+="
        if mark == ">":
            assert tag not in lines
            lines[tag] = []
        elif mark == "|":
            lines[tag].append(content)
        elif mark == "+":
            lines[tag][-1] += content
    return {tag: "\n".join(texts) for tag, texts in lines.items()}


def test_several_rows_are_live_side_by_side(fake, capsys):
    code, out, _ = run(capsys, "--prompt", "a longer prompt", "--prompt", "two\nlines", "--prompt", "x")
    assert code == 0
    assert out.splitlines() == [
        "[1/3] > a longer prompt",
        "[2/3] > two lines",
        "[3/3] > x",
        "[3/3] | X",
        "[3/3] = length",
        "[2/3] | TWO",
        "[2/3] | LINES",
        "[2/3] = length",
        "[1/3] | A LONGER PROMPT",
        "[1/3] = length",
    ]


def written_by(pieces, seconds=0.0):
    """What a row of two has on the terminal after each of its pieces, which come so many seconds apart."""
    out, now = io.StringIO(), [100.0]
    printer = live_printer(["p", "q"], out, lambda: now[0])
    steps = []
    for piece in pieces:
        printer.on_text(1, piece, None)
        steps.append(out.getvalue().removeprefix("".join(steps)))
        now[0] += seconds
    printer.on_text(1, "", "stop")
    return [*steps, out.getvalue().removeprefix("".join(steps))]


def test_a_row_is_written_when_a_line_is_full():
    pieces = ["Four score and seven years ago our fathers ", "brought forth upon this conti", "nent."]
    assert written_by(pieces) == [
        "[2/2] > q\n",
        "[2/2] | Four score and seven years ago our fathers brought forth upon this \n",
        "",
        "[2/2] + continent.\n[2/2] = stop\n",
    ]


def test_a_slow_row_does_not_wait_for_a_full_line():
    assert written_by(["one", " two", " three", " fo", "ur"], seconds=LINE_SECONDS / 2) == [
        "[2/2] > q\n",
        "",
        "[2/2] | one two \n",
        "",
        "[2/2] + three \n",
        "[2/2] + four\n[2/2] = stop\n",
    ]
    assert written_by(["你好", "世界"], seconds=LINE_SECONDS)[1] == "[2/2] | 你好世界\n"


def test_a_line_break_ends_a_line_at_once():
    assert written_by(["a", "b\n", "\n", "c\nd", "\n"]) == [
        "[2/2] > q\n",
        "[2/2] | ab\n",
        "[2/2] | \n",
        "[2/2] | c\n",
        "[2/2] | d\n",
        "[2/2] | \n[2/2] = stop\n",
    ]


TEXTS = [
    "",
    "\n",
    "a",
    "a\n",
    "\n\na\n\n",
    "a b\n\n  c\r\nd",
    "[2/4] | + > =\n| +",
    "你好 世界\n👍",
    " \n ",
    "long " * 30,
]


@pytest.mark.parametrize("interrupted", [False, True])
def test_each_row_can_be_rebuilt_from_its_lines(interrupted):
    rng = random.Random(0)
    for _ in range(300):
        texts = [rng.choice(TEXTS) + rng.choice(TEXTS) for _ in range(4)]
        out = io.StringIO()
        printer = live_printer(["a prompt"] * 4, out, rng.choice([lambda: 0.0, itertools.count().__next__]))
        places = dict.fromkeys(range(4), 0)
        while places:
            row = rng.choice(list(places))
            new = texts[row][places[row] : places[row] + rng.choice([0, 1, 3, 70])]
            places[row] += len(new)
            ended = places[row] == len(texts[row])
            if interrupted and rng.random() < 0.2:
                ended = True  # with text that no callback has brought
                printer.on_text(row, new, None)
            else:
                printer.on_text(row, new, "length" if ended else None)
            if ended:
                del places[row]
        printer.finish([RequestOutput(1, [], text, "interrupted") for text in texts])
        assert rebuilt(out.getvalue()) == {f"[{i + 1}/4]": text for i, text in enumerate(texts)}
        ends = [line for line in out.getvalue().split("\n") if line[6:7] == "="]
        assert len(ends) == 4 and (interrupted or not any("interrupted" in line for line in ends))


def test_no_stream_prints_in_order_at_the_end(fake, capsys):
    _, out, _ = run(capsys, "--prompt", "a longer prompt", "--prompt", "two", "--no-stream")
    assert out == "[1/2] a longer prompt (length)\nA LONGER PROMPT\n\n[2/2] two (length)\nTWO\n\n"
    assert run(capsys, "--prompt", "one", "--no-stream")[1] == "ONE\n"


def test_interrupt_with_several_rows_and_json(fake, capsys):
    fake.configure(stop_after=1)
    code, out, _ = run(capsys, "--prompt", "a longer one", "--prompt", "ab", "--json")
    outputs = json.loads(out)["outputs"]
    assert code == 130
    assert [(o["text"], o["finish_reason"]) for o in outputs] == [("A ", "interrupted"), ("AB", "length")]
    _, out, _ = run(capsys, "--prompt", "a longer one", "--prompt", "ab")
    ends = "[2/2] | AB\n[2/2] = length\n[1/2] | A \n[1/2] = interrupted\n"
    assert out == "[1/2] > a longer one\n[2/2] > ab\n" + ends
    _, out, _ = run(capsys, "--prompt", "a longer one", "--prompt", "ab", "--no-stream")
    assert out == "[1/2] a longer one (interrupted)\nA \n\n[2/2] ab (length)\nAB\n\n"
