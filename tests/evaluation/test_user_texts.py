"""Texts of the user's own: what a line may be, and which of its tokens are measured."""

from __future__ import annotations

import json

import pytest

from sv_jax.config import UserError
from sv_jax.evaluation.texts import user_cases
from sv_jax.evaluation.user_texts import read_texts
from tests.evaluation.words import BOS, WordTokenizer, make_document


def write(tmp_path, *lines):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_lines_become_texts(tmp_path):
    texts = read_texts(write(tmp_path, {"text": "a\u2028b"}, "", {"text": "c", "kind": "mail", "name": "x"}))
    assert [(t.name, t.kind, t.text, t.line) for t in texts] == [
        ("line-1", "own", "a\u2028b", 1),
        ("x", "mail", "c", 3),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is not JSON: .* at character 2"),
        ("[1]", r"line 2 is not a JSON object; allowed: \{\"text\": \.\.\.,"),
        ({"kind": "x"}, "line 2 has no text; allowed"),
        ({"text": " "}, "line 2: text is ' '; allowed: text that is not blank"),
        (
            {"text": "a", "kind": "needle"},
            "line 2: kind 'needle' is a built-in kind; allowed: any other name",
        ),
        ({"text": "a", "kind": 3}, "line 2: kind is 3; allowed"),
        ({"text": "a", "file": "b"}, "line 2: unknown key 'file'; allowed: text, kind, name"),
        ({"text": "a", "name": "line-1"}, "line 2: name 'line-1' is line 1's, too"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        read_texts(write(tmp_path, {"text": "fine"}, line))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_texts(tmp_path / "none")
    with pytest.raises(UserError, match="has no texts"):
        read_texts(write(tmp_path, "", " "))
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(UserError, match=r"is not UTF-8 text \(byte 0\)"):
        read_texts(tmp_path / "latin")


@pytest.mark.parametrize("bos", [False, True])
def test_the_last_tokens_are_measured(tmp_path, bos):
    tokenizer = WordTokenizer(bos=bos)
    long, short = make_document("a").text, make_document("b", paragraphs=2).text
    lines = [{"text": long}, {"text": short, "name": "s"}, {"text": long + "x", "kind": "mail", "name": "m"}]
    texts = read_texts(write(tmp_path, *lines))
    cases = user_cases(texts, tokenizer, context=400, measured=32)
    assert [(c.name, c.kind, c.document, c.measured) for c in cases] == [
        ("own/line-1/400", "own", "line-1", 32),
        ("mail/m/400", "mail", "m", 32),
    ]
    assert {len(case.token_ids) for case in cases} == {384}
    ids = tokenizer.encode(long, add_special_tokens=False)
    assert list(cases[0].token_ids) == ([BOS, *ids[-383:]] if bos else ids[-384:])
    assert len(user_cases(texts, tokenizer, context=60, measured=32, limit=1)) == 2  # of each kind
