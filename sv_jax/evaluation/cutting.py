"""What a text to be measured is, and how documents are cut to its length, token for token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sv_jax.config import UserError
from sv_jax.evaluation.documents import name_hash

RESERVED = 16  # slots of the context that stay free: a step's own tokens


class TextTokenizer(Protocol):
    """What is asked of a tokenizer here; `sv_jax.checkpoints.Tokenizer` is one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclasses.dataclass(frozen=True)
class Case:
    """One text.

    name: unique, e.g. "copy/1861-Lincoln-1/4096".
    kind: "ordinary", "copy", "needle", or the user's.
    document: where the text is from, the unit of the bootstrap.
    token_ids: context and continuation.
    measured: the last so many tokens are those whose prediction is compared; a needle's are its answer.
    """

    name: str
    kind: str
    document: str
    token_ids: tuple[int, ...]
    measured: int


def leading_ids(tokenizer: TextTokenizer) -> list[int]:
    """What the tokenizer puts before a text (BOS), [] where it puts nothing."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


def encode_piece(tokenizer: TextTokenizer, text: str, most: int | None = None) -> list[int]:
    """Token ids of a piece inside of a text; of its beginning where no more than `most` are of use."""
    if most is None:
        return tokenizer.encode(text, add_special_tokens=False)
    # A token of real text has 3 to 6 characters; to encode a megabyte for 4,000 tokens would take a second.
    ids = tokenizer.encode(text[: 6 * most], add_special_tokens=False)
    if len(ids) <= most and len(text) > 6 * most:  # the last token may be a fragment of a word
        ids = tokenizer.encode(text[: 24 * most], add_special_tokens=False)
    return ids[:most]


def covered_text(tokenizer: TextTokenizer, text: str, tokens: int) -> str:
    """The beginning of `text` that has at least so many tokens, and hardly more; "" where it has fewer."""
    ids = encode_piece(tokenizer, text, tokens)
    if len(ids) < tokens:
        return ""
    # Some more: a text that is cut in two is encoded in a few tokens more, or fewer.
    return text[: len(tokenizer.decode(ids, skip_special_tokens=False)) + 200]


def case_length(context: int, least: int) -> int:
    """Tokens of a case. Raises UserError where the context does not hold `least` of them."""
    total = context - RESERVED
    if total < least:
        raise UserError(f"a context of {context} tokens is too short; allowed: at least {least + RESERVED}")
    return total


def case_generator(name: str, context: int, seed: int) -> np.random.Generator:
    """Draws that depend on the case alone: other documents and limits do not show in it."""
    return np.random.default_rng([name_hash(name), context, seed])
