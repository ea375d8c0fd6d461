"""Streaming: pieces are whole characters, and together they are the text."""

from __future__ import annotations

import random

import pytest

from sv_jax.engine.text_stream import INCOMPLETE, TextStream

TEXTS = [
    "plain",
    "größer — naïve",
    "日本語のテキスト、漢字とかな。",
    "👍🏽 👨‍👩‍👧‍👦 🇫🇷 flags",
    "mixed: é日👍a",
    "",
]


class ByteTokenizer:
    """One token per byte, as byte-level BPE without any merge; 256 is a special token without text."""

    def decode(self, token_ids):
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")


class ByteFallbackTokenizer:
    """Tokens 0..255 are bytes, others words with a leading space, as in SentencePiece models.

    A run of bytes that is not valid UTF-8 becomes one replacement character a byte, and the text's first
    space is dropped.
    """

    WORDS = {1000: " Hello", 1001: " world", 1002: ""}  # noqa: RUF012

    def decode(self, token_ids):
        parts, run = [], b""
        for token in [*token_ids, None]:
            if token is not None and token < 256:
                run += bytes([token])
                continue
            try:
                parts.append(run.decode("utf-8"))
            except UnicodeDecodeError:
                parts.append(INCOMPLETE * len(run))
            run = b""
            parts.append(self.WORDS.get(token, ""))
        return "".join(parts).removeprefix(" ")


def pieces_of(tokenizer, tokens, sizes=None):
    """The pieces of tokens that arrive in portions of the given sizes (default: one by one)."""
    stream, pieces, start = TextStream(tokenizer), [], 0
    for size in sizes or [1] * len(tokens):
        pieces.append(stream.push(tokens[start : start + size]))
        start += size
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_nothing_is_lost(text):
    tokens = list(text.encode())
    pieces = pieces_of(ByteTokenizer(), tokens)
    assert "".join(pieces) == text
    assert all(INCOMPLETE not in piece for piece in pieces)
    assert pieces[-1] == ""


def test_a_character_comes_with_its_last_byte():
    assert pieces_of(ByteTokenizer(), list("é👍!".encode())) == ["", "é", "", "", "", "👍", "!", ""]


def test_a_cut_character_comes_at_the_end():
    assert pieces_of(ByteTokenizer(), list("ok 👍".encode())[:-1]) == ["o", "k", " ", "", "", "", INCOMPLETE]


def test_an_invalid_byte_waits_only_for_the_next_character():
    assert pieces_of(ByteTokenizer(), [0x41, 0xFF, 0x42]) == ["A", "", INCOMPLETE + "B", ""]


def test_a_real_replacement_character_is_kept():
    text = f"a{INCOMPLETE}b{INCOMPLETE}"
    assert "".join(pieces_of(ByteTokenizer(), list(text.encode()))) == text


def test_special_tokens_have_no_text():
    tokens = [256, *b"a", 256, *"é".encode(), 256]
    assert "".join(pieces_of(ByteTokenizer(), tokens)) == "aé"


def test_portions_do_not_matter():
    rng = random.Random(0)
    for _ in range(200):
        # Also bytes that are no text: the sum of the pieces is what decoding at once gives.
        tokens = [*rng.choices(range(257), k=rng.randrange(12)), *rng.choice(TEXTS).encode()]
        tokens += rng.choices([0xF0, 0x9F, 0x98, 0x80, 0xFF, 256], k=rng.randrange(9))
        sizes = []
        while sum(sizes) < len(tokens):
            sizes.append(rng.randint(1, 5))
        assert "".join(pieces_of(ByteTokenizer(), tokens, sizes)) == ByteTokenizer().decode(tokens)


def test_leading_space_is_dropped_at_the_start_only():
    assert pieces_of(ByteFallbackTokenizer(), [1000, 1001, 1000]) == ["Hello", " world", " Hello", ""]
    assert pieces_of(ByteFallbackTokenizer(), [1002, 1000, 1001]) == ["", "Hello", " world", ""]


def test_byte_fallback_keeps_characters_that_are_out_already():
    tokens = [1000, *"你好".encode()]
    assert "".join(pieces_of(ByteFallbackTokenizer(), tokens)) == "Hello你好"
    cut = pieces_of(ByteFallbackTokenizer(), tokens[:-1])
    assert "".join(cut) == "Hello你" + 2 * INCOMPLETE
    assert (
        "".join(pieces_of(ByteFallbackTokenizer(), [*tokens[:-1], 1001]))
        == "Hello你" + 2 * INCOMPLETE + " world"
    )


def test_stream_is_empty_after_finish():
    stream = TextStream(ByteTokenizer())
    stream.push(b"a\xf0")
    assert stream.finish() == INCOMPLETE
    assert stream.push(b"b") == "b"


def test_text_before_an_incomplete_character_does_not_wait():
    class Tokenizer(ByteTokenizer):  # merges a space with the first byte of an emoji, as byte-level BPE does
        def decode(self, token_ids):
            return super().decode(
                [b for token in token_ids for b in ([0x20, 0xF0] if token == 300 else [token])]
            )

    assert pieces_of(Tokenizer(), [0x61, 300, 0x9F, 0x98, 0x80]) == ["a", " ", "", "", "😀", ""]


LONG_RUNS = {
    "special tokens": ([256] * 4000, ""),
    "specials inside of a character": ([0xE4, *[256] * 4000, 0xBD, 0xA0], "你"),
    "invalid bytes, then text": ([0xFF] * 4000 + list("你!".encode()), 4000 * INCOMPLETE + "你!"),
    "cut characters": ([0xF0, 0x9F, 0x98] * 1500 + [0x80], 1499 * INCOMPLETE + "😀"),
}


@pytest.mark.parametrize("name", LONG_RUNS)
@pytest.mark.parametrize("start", [b"", b"Hi"])
def test_cost_does_not_grow_in_a_run_without_text(name, start):
    tokens, text = LONG_RUNS[name]

    class Counting(ByteTokenizer):
        most = 0

        def decode(self, token_ids):
            Counting.most = max(Counting.most, len(token_ids))
            return super().decode(token_ids)

    assert "".join(pieces_of(Counting(), [*start, *tokens])) == start.decode() + text
    assert Counting.most < 100


def test_a_long_run_of_invalid_bytes_with_byte_fallback():
    # One invalid byte spoils the run that it is in, however long: as decoding at once does.
    for spoiled in ([0xFF], [0xE4, 0xBD], []):
        tokens = [1000, *spoiled, *("你好" * 50).encode(), 1001, *"你".encode()]
        assert "".join(pieces_of(ByteFallbackTokenizer(), tokens)) == ByteFallbackTokenizer().decode(tokens)


@pytest.mark.real
def test_real_tokenizer():
    from sv_jax.checkpoints import resolve

    tokenizer = resolve("smollm2-135m").tokenizer()
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        pieces = pieces_of(tokenizer, tokens)
        assert "".join(pieces) == tokenizer.decode(tokens) == text
        assert all(INCOMPLETE not in piece for piece in pieces)
    assert len(tokenizer.encode(TEXTS[3])) > len(TEXTS[3])  # characters really are spread over tokens
