"""Text while it is generated: tokens go in as they come, whole characters come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoders put where the bytes of a character are missing
CHARACTER_BYTES = 4  # of UTF-8, at most
LONGEST_WAIT = 64  # tokens


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int]) -> str: ...


class TextStream:
    """Decodes one row's tokens as they arrive; the pieces together are the text of all of them.

    A character may be spread over several tokens (emoji, CJK), and a token's text may depend on its left
    neighbour (a leading space is stripped at the start of a text only). So each piece is the difference of
    two decodings of a short window of tokens, and an incomplete character at the window's end waits:

        tokens      Hi   ␣F0  9F   98   80   !
        pieces      Hi   ␣              😀   !
                          └─── waits ───┘

    The window goes back one piece, whatever came before: the cost of a token does not grow with the text.
    """

    def __init__(self, tokenizer: Decoder):
        self._tokenizer = tokenizer
        self._restart([])

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete, perhaps none."""
        return "".join(self._push_one(int(token)) for token in token_ids)

    def finish(self) -> str:
        """What still waits. After this the stream is empty."""
        rest = self._text[self._out :]
        self._restart([])
        return rest

    def _restart(self, context: list[int]) -> None:
        """A window of tokens whose text is out."""
        self._window = context
        self._context = len(context)
        self._before = self._text = self._tokenizer.decode(context)
        self._out = len(self._text)  # characters of the window's text that are out

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode_window()
        if text == self._text and not self._tokenizer.decode([token, token]):
            self._window.pop()  # special tokens have no text, and a run of them must not fill the window
            return ""
        self._text = text
        incomplete = len(text) - len(text.rstrip(INCOMPLETE))
        # What is missing is part of one character: a decoder shows it as one mark, or as one a byte.
        end = max(self._out, len(text) - min(incomplete, CHARACTER_BYTES - 1))
        piece, self._out = text[self._out : end], end
        if not incomplete and len(text) > len(self._before):
            self._restart(self._window[self._context :])
        elif len(self._window) - self._context > LONGEST_WAIT:
            self._forget_invalid()
        return piece

    def _decode_window(self) -> str:
        text = self._tokenizer.decode(self._window)
        if text.startswith(self._before):
            return text
        # Byte-fallback decoders replace a whole run of bytes when its end is invalid, even the characters
        # in it that were fine, and are out.
        return self._before + self._tokenizer.decode(self._window[self._context :])

    def _forget_invalid(self) -> None:
        """Shortens a long run of bytes that are no text.

        Its start stays, since a byte-fallback decoder shows the run as invalid for that, and its end, which
        may be the beginning of a character.
        """
        held = len(self._text) - self._out
        start, end = self._context + CHARACTER_BYTES, len(self._window) - 4 * CHARACTER_BYTES
        del self._window[start:end]
        self._text = self._decode_window()
        self._out = len(self._text) - held
