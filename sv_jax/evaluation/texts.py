"""Texts that dense and sparse verification are compared on, cut to a context's length.

    ordinary   document ............................................ [measured]
    copy       document .. passage .. document .. lead-in, passage's [measured]
    needle     speech .. fact ................ speech .. question    [answer]

Ordinary text needs little of what lies far back, so it says little about a selector; copying and needles do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sv_jax.config import UserError
from sv_jax.evaluation.documents import Document, Split, Style, load_documents, name_hash, split_of

KINDS = ("ordinary", "copy", "needle")
MEASURED = 128  # tokens of an ordinary or copied text whose prediction is compared
RESERVED = 16  # slots of the context that stay free: a step's own tokens
LOCKED_ON = 16  # first tokens of a repeated passage, unmeasured: the model sees that it is to copy
FAR_BACK = 0.75  # share of the document's tokens that a passage is taken from: not of its recent quarter
PASSAGE_DRAWS = 20  # places that are tried
UNIQUE = 12  # tokens of a passage's beginning that stand nowhere else in the body
LEAD_INS: dict[Style, str] = {
    "prose": "\n\nThe following passage was quoted above. Here it is again, word for word:\n\n",
    "code": "\n\n# The following lines stand above, too. Here they are again, unchanged:\n\n",
}


class TextTokenizer(Protocol):
    """What is asked of a tokenizer here; `sv_jax.checkpoints.Tokenizer` is one."""

    has_chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(self, messages: list[dict], *, add_generation_prompt: bool = True) -> str: ...


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


def make_cases(
    kind: str,
    tokenizer: TextTokenizer,
    *,
    context: int,
    split: Split = "evaluation",
    limit: int | None = None,
    seed: int = 0,
    measured: int = MEASURED,
    cache_directory: Path | None = None,
    documents: Sequence[Document] | None = None,
) -> list[Case]:
    """Cases of one kind and length, the same for the same arguments.

    Args:
      kind: one of KINDS.
      context: tokens that the model's context has to hold; cases have `context - RESERVED` of them, all alike.
      split: which part of the documents.
      limit: most cases; None: as many as the documents give.
      seed: of positions in the documents, and of needles.
      measured: of ordinary and copied text. A needle's is the length of its answer.
      documents: None: the built-in ones, see `load_documents`.

    Raises:
      UserError: an unknown kind, a context that is too short, no document that fills the context, or
        documents that cannot be fetched.
    """
    makers: dict[str, Callable[..., list[Case]]] = {"ordinary": _ordinary_case, "copy": _copy_case}
    if kind not in makers:
        raise UserError(f"kind {kind!r} is not allowed; allowed: {', '.join(KINDS)}")
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit}; allowed: 1 or more")
    if documents is None:
        style: Style | None = "prose" if kind == "needle" else None
        documents = load_documents(style, cache_directory=cache_directory)
    cases: list[Case] = []
    for document in documents:
        if split_of(document.name) == split:
            cases += makers[kind](tokenizer, document, context=context, seed=seed, measured=measured)
        if limit is not None and len(cases) >= limit:
            return cases[:limit]
    if not cases:
        raise UserError(f"no document of the {split} part fills a context of {context} tokens ({kind})")
    return cases


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
    if len(ids) <= most:  # the last token may be a fragment of a word
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


def line_starts(text: str) -> np.ndarray:
    """Offsets of the first characters of lines that are not blank, behind the first line."""
    found, offset = [], 0
    for line in text.splitlines(keepends=True):
        if offset and line.strip():
            found.append(offset)
        offset += len(line)
    return np.array(found, int)


def _ordinary_case(
    tokenizer: TextTokenizer, document: Document, *, context: int, seed: int, measured: int
) -> list[Case]:
    del seed  # the document's beginning, always
    total = case_length(context, measured + 1)
    ids = (leading_ids(tokenizer) + encode_piece(tokenizer, document.text, total))[:total]
    if len(ids) < total:
        return []
    name = f"ordinary/{document.name}/{context}"
    return [Case(name, "ordinary", document.name, tuple(ids), measured)]


def _copy_case(
    tokenizer: TextTokenizer, document: Document, *, context: int, seed: int, measured: int
) -> list[Case]:
    """The document's beginning, a lead-in, and once more a passage from far back."""
    head, lead_in = leading_ids(tokenizer), encode_piece(tokenizer, LEAD_INS[document.style])
    length = LOCKED_ON + measured
    total = case_length(context, 4 * length + len(lead_in))
    body = total - len(head) - len(lead_in) - length  # tokens of the document itself
    text = covered_text(tokenizer, document.text, body)
    name = f"copy/{document.name}/{context}"
    generator = case_generator(name, context, seed)
    for _ in range(PASSAGE_DRAWS if text else 0):
        start = _draw_line_start(text, generator)
        # The two sides are encoded apart, so that the passage has the same tokens at both of its places.
        before = encode_piece(tokenizer, text[:start])
        after = encode_piece(tokenizer, text[start:])[: body - len(before)]
        passage = after[:length]
        far_back = len(before) + length <= body * FAR_BACK
        if len(before + after) == body and far_back and _occurs_once(before + after, passage[:UNIQUE]):
            ids = tuple(head + before + after + lead_in + passage)
            return [Case(name, "copy", document.name, ids, measured)]
    return []  # too short, or it repeats itself anyhow (a table)


def _draw_line_start(text: str, generator: np.random.Generator) -> int:
    """Offset of the line start that is nearest to a random place of the text, outside of its recent part."""
    starts = line_starts(text)
    place = generator.uniform(0.02, FAR_BACK) * len(text)
    return int(starts[np.argmin(abs(starts - place))]) if len(starts) else 0


def _occurs_once(ids: list[int], passage: list[int]) -> bool:
    size = len(passage)
    return sum(ids[i : i + size] == passage for i in range(len(ids) - size + 1)) == 1
