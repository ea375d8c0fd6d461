"""One row's text: exact stop strings, whatever the tokens are and however they arrive."""

from __future__ import annotations

import random

import pytest

from sv_jax.config import UserError
from sv_jax.engine.row_text import RowText, TextDelta, check_stop
from sv_jax.engine.text_stream import INCOMPLETE
from tests.engine import real_tokenizers


class Pieces:
    """Token i is the i-th of the given pieces of text or bytes."""

    def __init__(self, *pieces):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.ids = list(range(len(pieces)))

    def decode(self, token_ids):
        return b"".join(self.pieces[token] for token in token_ids).decode("utf-8", errors="replace")


def portions(tokens, rng):
    """`tokens`, cut at random."""
    start = 0
    while start < len(tokens):
        size = rng.randint(0, 6)
        yield tokens[start : start + size]
        start += size


def outcome(tokenizer, chunks, **how):
    """(text, number of kept ids, whether a stop string ended the row) of ids that arrive in chunks."""
    row, text, kept, stopped = RowText(tokenizer, **how), "", 0, False
    for chunk in chunks:
        delta = row.push(chunk)
        text, kept, stopped = text + delta.text, kept + delta.kept, delta.stopped
        assert delta.kept == len(chunk) or stopped
        if stopped:
            break
    return text + row.finish(), kept, stopped


def expected(tokenizer, tokens, stop, include_stop=False):
    """The definition: the shortest prefix of the ids whose text has a stop string, cut at it."""
    for kept in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:kept])
        if found := [(text.index(s), -len(s)) for s in stop if s in text]:
            start, length = min(found)
            return text[: start - length if include_stop else start], kept, True
    return tokenizer.decode(tokens), len(tokens), False


CASES = {
    # pieces, stop strings: text, kept ids
    "one whole token": (["a", "END", "b"], ["END"], "a", 2),
    "over several tokens": (["a", "E", "N", "D", "b"], ["END"], "a", 4),
    "begins in the middle of a token": (["a E", "ND", "b"], ["END"], "a ", 2),
    "ends in the middle of a token": (["a", "EN", "D and more", "b"], ["END"], "a", 3),
    "inside of one token": (["xxENDyy", "b"], ["END"], "xx", 1),
    "at once": (["END"], ["END"], "", 1),
    "a beginning that was none": (["a", "E", "N", "x", "b"], ["END"], "aENxb", 5),
    "a beginning at the end": (["a", "E", "N"], ["END"], "aEN", 3),
    "overlapping beginnings": (["a", "a", "a", "b", "c"], ["aab"], "a", 4),
    "aab after aa and ab": (["aa", "ab", "c"], ["aab"], "a", 2),
    "a false start inside of the match": (["abab", "ac", "x"], ["ababac"], "", 2),
    "the earliest token counts": (["x", "ab", "cd"], ["abcd", "b"], "xa", 2),
    "in one token the earliest beginning": (["x", "abcd"], ["c", "bcd"], "xa", 2),
    "of one beginning either": (["x", "abc"], ["ab", "abc"], "x", 2),
    "several, none of them": (["x", "a", "y"], ["ab", "ac"], "xay", 3),
    "the first of two places": (["a|b", "|c"], ["|"], "a", 1),
    "line breaks": (["one\n", "\ntwo"], ["\n\n"], "one", 2),
    "a space": (["one", " two"], [" "], "one", 2),
    "emoji in bytes": (["hi ", *(bytes([b]) for b in "👍".encode()), "x"], ["👍"], "hi ", 5),
    "emoji in odd parts": ([b"hi \xf0", b"\x9f\x91", b"\x8d and"], ["👍"], "hi ", 3),
    "a family": (["x", *(bytes([b]) for b in "👨‍👩‍👧".encode())], ["👨‍👩‍👧"], "x", 19),
    "a part of an emoji": ([*(bytes([b]) for b in "👨‍👩‍👧".encode())], ["👩"], "👨‍", 11),
    "CJK over tokens": ([b"\xe4\xbd\xa0\xe5", b"\xa5\xbd\xe3", b"\x80\x82!"], ["好。"], "你", 3),
    "another character with the same first bytes": (["a", b"\xf0\x9f\x91", b"\x8e", "b"], ["👍"], "a👎b", 4),
    "text before an incomplete character": (["a", b"!\xf0", b"\x9f\x91\x8d"], ["!"], "a", 2),
    "a cut character at the end": (["a", b"\xf0\x9f"], ["👍"], "a" + INCOMPLETE, 2),
    "no text": ([], ["x"], "", 0),
}


@pytest.mark.parametrize("name", CASES)
def test_stop_strings(name):
    pieces, stop, text, kept = CASES[name]
    tokenizer = Pieces(*pieces)
    assert expected(tokenizer, tokenizer.ids, stop)[:2] == (text, kept)
    rng = random.Random(0)
    for _ in range(20):
        chunks = list(portions(tokenizer.ids, rng))
        assert outcome(tokenizer, chunks, stop=stop)[:2] == (text, kept)
        whole = outcome(tokenizer, chunks, stop=stop, include_stop=True)
        assert whole == expected(tokenizer, tokenizer.ids, stop, include_stop=True)


def test_include_stop_shows_the_longest_of_those_that_one_token_completes():
    assert outcome(Pieces("x", "abcd"), [[0, 1]], stop=["ab", "abc"], include_stop=True)[0] == "xabc"
    assert outcome(Pieces("ab", "c"), [[0, 1]], stop=["ab", "abc"], include_stop=True)[0] == "ab"


def test_what_could_be_a_stop_string_is_held_back():
    row = RowText(Pieces("a<", "|", "en", "x", "<|end", "|>y", "z"), stop=["<|end|>", "|e"])
    assert row.push([0]) == TextDelta("a", 1, False)
    assert row.push([1]) == TextDelta("", 1, False)
    assert row.push([6]) == TextDelta("<|z", 1, False)
    assert row.push([4, 5, 3]) == TextDelta("<", 1, True)
    row = RowText(Pieces("a<", "|", "x<", "e"), stop=["<|end|>"])
    assert [row.push([i]).text for i in range(3)] == ["a", "", "<|x"]
    assert row.finish() == "<"


def test_nothing_is_held_without_stop_strings():
    row = RowText(Pieces("a", "b", b"\xf0"))
    assert row.push([0, 1]) == TextDelta("ab", 2, False)
    assert row.push([2]) == TextDelta("", 1, False)
    assert (row.finish(), row.finish()) == (INCOMPLETE, "")


def test_nothing_is_kept_after_a_stop_string():
    row = RowText(Pieces("a", "b", "c"), stop=["b"])
    assert row.push([0, 1, 2]) == TextDelta("a", 2, True)
    assert row.push([2]) == row.push([]) == TextDelta("", 0, True)
    assert row.finish() == ""


def random_stops(text, rng):
    """One to three parts of a text, some of them changed so that they begin like it and go on otherwise."""
    stops = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text))
        part = text[start : start + rng.choice([1, 2, 3, 5, 9])]
        stops.append(part + rng.choice(["", "", "q", "。"]))
    return stops


@pytest.mark.parametrize("alphabet", ["ab", "aé你👍"])
def test_random_pieces_are_as_the_definition_says(alphabet):
    rng = random.Random(1)
    for _ in range(1500):
        data = "".join(rng.choices(alphabet, k=rng.randint(1, 14))).encode()
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randint(0, 12)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)]) if b > a]
        tokenizer = Pieces(*pieces)
        stop = ["".join(rng.choices(alphabet, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        include = rng.random() < 0.5
        got = outcome(tokenizer, portions(tokenizer.ids, rng), stop=stop, include_stop=include)
        assert got == expected(tokenizer, tokenizer.ids, stop, include), (pieces, stop, include)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_tokenizers_of_models(kind):
    tokenizer = getattr(real_tokenizers, kind)()
    rng = random.Random(2)
    stopped = 0
    for text in real_tokenizers.pages().values():
        for _ in range(40):
            start = rng.randrange(len(text) - 100)
            tokens = tokenizer.encode(text[start : start + rng.randint(10, 100)]).ids
            assert outcome(tokenizer, portions(tokens, rng)) == expected(tokenizer, tokens, [])
            stop, include = random_stops(tokenizer.decode(tokens), rng), rng.random() < 0.5
            got = outcome(tokenizer, portions(tokens, rng), stop=stop, include_stop=include)
            assert got == expected(tokenizer, tokens, stop, include), (text, stop)
            stopped += got[2]
    assert stopped > 50


def test_any_ids_of_a_byte_level_tokenizer():
    # What a model with random weights writes: special tokens and bytes that are no characters, too.
    tokenizer = real_tokenizers.byte_level()
    rng = random.Random(3)
    for _ in range(300):
        tokens = rng.choices(range(tokenizer.get_vocab_size()), k=rng.randint(1, 40))
        text = tokenizer.decode(tokens)
        assert outcome(tokenizer, portions(tokens, rng)) == (text, len(tokens), False)
        stop = random_stops(text.replace(INCOMPLETE, "?") or "?", rng)
        got = outcome(tokenizer, portions(tokens, rng), stop=stop)
        assert got == expected(tokenizer, tokens, stop), (tokens, stop)


@pytest.mark.real
def test_a_published_tokenizer():
    from sv_jax.checkpoints import resolve

    tokenizer = resolve("smollm2-135m", progress=False).tokenizer()
    rng = random.Random(4)
    for text in ("hello 👍🏽 world 👍 and 日本語のテキスト", "def f(x):\n    return x\n\n\ndef g"):
        tokens = tokenizer.encode(text)
        for _ in range(100):
            stop = random_stops(text, rng)
            assert outcome(tokenizer, portions(tokens, rng), stop=stop) == expected(tokenizer, tokens, stop)


def test_cost_of_a_token_does_not_grow():
    decoded = []

    class Counting(Pieces):
        def decode(self, token_ids):
            decoded.append(len(token_ids))
            return super().decode(token_ids)

    tokenizer = Counting("ab ", "c", b"\xe4\xbd", b"\xa0")
    row = RowText(tokenizer, stop=["ab ab c", "x" * 1000])
    for _ in range(500):
        row.push([0, 1, 2, 3])
    assert sum(decoded) < 20 * 2000


@pytest.mark.parametrize("stop, named", [("END", "'END'"), (["a", ""], "''"), ([3], "3"), ([None], "None")])
def test_bad_stop_strings(stop, named):
    with pytest.raises(UserError, match=f"stop={named} is not allowed; allowed: a list of texts"):
        RowText(Pieces(), stop=stop)
    assert check_stop(["a", "\n"]) == ("a", "\n")
