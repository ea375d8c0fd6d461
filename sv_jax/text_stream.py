"""Text while it is generated: tokens go in as they come, whole characters come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoders put where the bytes of a character are missing


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int]) -> str: ...


class TextStream:
    """Decodes one row's tokens as they arrive; the pieces together are the text of all of them.

    A character may be spread over several tokens (emoji, CJK), and a token's text may depend on its left
    neighbour (a leading space is stripped at the start of a text only). So each piece is the difference of
    two decodings that start at the previous piece's tokens, and it waits while it ends in the middle of a
    character:

        tokens      Hi   ' '  F0 9F   98   80   !
        emitted          Hi  ' '            emoji   !
                                 └── waits ──┘
    """

    def __init__(self, tokenizer: Decoder):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # from the last emitted piece on
        self._emitted = 0  # how many of them are out already

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete, perhaps none."""
        return "".join(self._push_one(int(token)) for token in token_ids)

    def finish(self) -> str:
        """What still waits. After this the stream is empty."""
        rest = self._waiting_text()
        self._tokens, self._emitted = [], 0
        return rest

    def _push_one(self, token: int) -> str:
        self._tokens.append(token)
        text = self._waiting_text()
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._tokens, self._emitted = self._tokens[self._emitted :], len(self._tokens) - self._emitted
        return text

    def _waiting_text(self) -> str:
        before = self._tokenizer.decode(self._tokens[: self._emitted])
        text = self._tokenizer.decode(self._tokens)
        if text.startswith(before):
            return text[len(before) :]
        # Byte-fallback decoders replace a whole run of bytes when its end is invalid, even the characters
        # in it that were fine, and are out.
        return self._tokenizer.decode(self._tokens[self._emitted :])
