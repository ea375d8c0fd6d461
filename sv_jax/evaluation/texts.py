"""Texts that dense and sparse verification are compared on, cut to a context's length.

    ordinary   document ............................................ [measured]
    copy       document .. passage .. document .. lead-in, passage's [measured]
    needle     speech .. fact ................ speech .. question    [answer]

Ordinary text needs little of what lies far back, so it says little about a selector; copying and needles do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sv_jax.config import UserError
from sv_jax.evaluation.cutting import (
    Case,
    TextTokenizer,
    case_generator,
    case_length,
    covered_text,
    encode_piece,
    leading_ids,
)
from sv_jax.evaluation.documents import Document, Split, Style, load_documents, split_of
from sv_jax.evaluation.needles import PER_DOCUMENT, needle_case
from sv_jax.evaluation.user_texts import KINDS, UserText

__all__ = ["KINDS", "MEASURED", "Case", "make_cases", "user_cases"]

MEASURED = 128  # tokens of an ordinary or copied text whose prediction is compared
LOCKED_ON = 16  # first tokens of a repeated passage, unmeasured: the model sees that it is to copy
FAR_BACK = 0.75  # share of the document's tokens that a passage is taken from: not of its recent quarter
PASSAGE_DRAWS = 20  # places that are tried
UNIQUE = 12  # tokens of a passage's beginning that stand nowhere else in the body
LEAD_INS: dict[Style, str] = {
    "prose": "\n\nThe following passage was quoted above. Here it is again, word for word:\n\n",
    "code": "\n\n# The following lines stand above, too. Here they are again, unchanged:\n\n",
}


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
      context: tokens of the model's context; cases have `context - RESERVED` of them, all alike.
      split: which part of the documents.
      limit: most cases; None: as many as the documents give.
      seed: of positions in the documents, and of needles.
      measured: of ordinary and copied text. A needle's is the length of its answer.
      documents: None: the built-in ones, see `load_documents`.

    Raises:
      UserError: an unknown kind, a context that is too short, no document that fills the context, or
        documents that cannot be fetched.
    """
    if kind not in KINDS:
        raise UserError(f"kind {kind!r} is not allowed; allowed: {', '.join(KINDS)}")
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit}; allowed: 1 or more")
    if documents is None:
        style: Style | None = "prose" if kind == "needle" else None
        documents = load_documents(style, cache_directory=cache_directory)
    documents = [document for document in documents if split_of(document.name) == split]
    place = {"context": context, "seed": seed}
    candidates: Iterator[Case | None]
    if kind == "ordinary":
        candidates = (_ordinary_case(tokenizer, x, context, measured) for x in documents)
    elif kind == "copy":
        candidates = (_copy_case(tokenizer, x, measured, **place) for x in documents)
    else:  # one needle of every document before the second of any
        turns = itertools.product(range(PER_DOCUMENT), documents)
        candidates = (needle_case(tokenizer, x, number=number, **place) for number, x in turns)
    cases = list(itertools.islice((case for case in candidates if case is not None), limit))
    if not cases:
        raise UserError(f"no document of the {split} part fills a context of {context} tokens ({kind})")
    return cases


def user_cases(
    texts: Sequence[UserText],
    tokenizer: TextTokenizer,
    *,
    context: int,
    limit: int | None = None,
    measured: int = MEASURED,
) -> list[Case]:
    """A case of each text that fills the context: its last tokens, the last `measured` of them measured.

    Args:
      limit: most cases of each kind.
    """
    head = leading_ids(tokenizer)
    total = case_length(context, measured + 1 + len(head))
    cases: list[Case] = []
    for text in texts:
        kept = sum(case.kind == text.kind for case in cases)
        ids = tokenizer.encode(text.text, add_special_tokens=False)
        if len(ids) + len(head) < total or (limit is not None and kept >= limit):
            continue
        ids = head + ids[len(ids) - (total - len(head)) :]
        cases.append(Case(f"{text.kind}/{text.name}/{context}", text.kind, text.name, tuple(ids), measured))
    return cases


def line_starts(text: str) -> np.ndarray:
    """Offsets of the first characters of lines that are not blank, behind the first line."""
    found, offset = [], 0
    for line in text.splitlines(keepends=True):
        if offset and line.strip():
            found.append(offset)
        offset += len(line)
    return np.array(found, int)


def _ordinary_case(tokenizer: TextTokenizer, document: Document, context: int, measured: int) -> Case | None:
    """The document's beginning; None where it is too short."""
    total = case_length(context, measured + 1)
    ids = (leading_ids(tokenizer) + encode_piece(tokenizer, document.text, total))[:total]
    name = f"ordinary/{document.name}/{context}"
    return Case(name, "ordinary", document.name, tuple(ids), measured) if len(ids) == total else None


def _copy_case(
    tokenizer: TextTokenizer, document: Document, measured: int, *, context: int, seed: int
) -> Case | None:
    """The document's beginning, a lead-in, and once more a passage from far back.

    None where the document is too short, or repeats itself anyhow (a table).
    """
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
            return Case(name, "copy", document.name, ids, measured)
    return None


def _draw_line_start(text: str, generator: np.random.Generator) -> int:
    """Offset of the line start that is nearest to a random place of the text, outside of its recent part."""
    starts = line_starts(text)
    place = generator.uniform(0.02, FAR_BACK) * len(text)
    return int(starts[np.argmin(abs(starts - place))]) if len(starts) else 0


def _occurs_once(ids: list[int], passage: list[int]) -> bool:
    size = len(passage)
    return sum(ids[i : i + size] == passage for i in range(len(ids) - size + 1)) == 1
