"""One row's text while it is generated, cut at the first stop string."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sv_jax.config import UserError
from sv_jax.engine.text_stream import Decoder, TextStream


@dataclasses.dataclass(frozen=True)
class TextDelta:
    """What one push gave."""

    text: str  # new, and never taken back
    kept: int  # of the pushed ids, those that belong to the output
    stopped: bool  # the last kept id completes a stop string


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """`stop` as a tuple. Raises UserError for anything but a sequence of texts that are not empty."""
    bad = [text for text in stop if not isinstance(text, str) or not text]
    if isinstance(stop, str) or bad:
        raise UserError(
            f"stop={bad[0] if bad else stop!r} is not allowed; allowed: a list of texts that are not empty"
        )
    return tuple(stop)


class RowText:
    """Tokens in, text out, up to the first stop string in the output.

    A stop string may begin and end anywhere in a token and be spread over any number of them; how the tokens
    are divided among calls makes no difference. The token that completes a stop string first ends the row: it
    is kept, and its characters behind the stop string are dropped. Of several stop strings that it completes,
    the one that begins first in the text counts, the longest of those that begin there. An incomplete
    character is no text yet, so a stop string ends with the last token of its last character.

    Text that may be the beginning of a stop string is held back until it is known not to be. Each token is
    looked at once, with the text that was held back before it.

    The caller does not push EOS ids (nor anything after one): they are output ids without text, even where a
    tokenizer would show one. Nor the prompt: a stop string in it does not count.

    Args:
      stop: texts that end the row; none of them empty.
      include_stop: the text ends behind the stop string, not before it.

    Raises:
      UserError: see `check_stop`.
    """

    def __init__(self, tokenizer: Decoder, *, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._stop = check_stop(stop)
        self._longest_start = max((len(text) for text in self._stop), default=1) - 1
        self._include_stop = include_stop
        self._stream = TextStream(tokenizer)
        self._held = ""
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Takes the row's next ids. After a stop string nothing is kept."""
        shown: list[str] = []
        for index, token in enumerate(token_ids):
            if self._stopped:
                return TextDelta("".join(shown), index, True)
            shown.append(self._push_one(token))
        return TextDelta("".join(shown), len(token_ids), self._stopped)

    def finish(self) -> str:
        """What was held back, of a row that ended without a stop string; "" after one.

        Nothing is lost: an incomplete character comes as the decoder shows it.
        """
        rest = "" if self._stopped else self._held + self._stream.finish()
        self._held = ""
        return rest

    def _push_one(self, token: int) -> str:
        piece = self._stream.push([token])
        if not piece:
            return ""
        text = self._held + piece
        if (cut := self._cut(text)) is not None:
            self._held, self._stopped = "", True
            return text[:cut]
        shown = len(text) - self._length_to_hold(text)
        self._held = text[shown:]
        return text[:shown]

    def _cut(self, text: str) -> int | None:
        """Where the output ends in `text`, if there is a stop string in it."""
        found = [(text.index(stop), -len(stop)) for stop in self._stop if stop in text]
        if not found:
            return None
        start, length = min(found)
        return start - length if self._include_stop else start

    def _length_to_hold(self, text: str) -> int:
        """Of the longest end of `text` that a stop string could begin with."""
        for length in range(min(len(text), self._longest_start), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0
