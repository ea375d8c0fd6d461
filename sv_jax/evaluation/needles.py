"""Needles: one short fact somewhere in a long text, and at its end a question that only the fact answers."""

from __future__ import annotations

import re

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
from sv_jax.evaluation.documents import Document, name_hash

PER_DOCUMENT = 3  # needles, each in a text of its own: one in each third of DEPTHS
DEPTHS = (0.05, 0.9)  # share of the text that stands before a needle
DIGITS = (10_000, 100_000)
ADJECTIVES = (
    "silver",
    "golden",
    "crimson",
    "quiet",
    "ancient",
    "northern",
    "hollow",
    "bright",
    "amber",
    "iron",
)
NOUNS = ("falcon", "harbor", "lantern", "meadow", "castle", "orchard", "river", "compass", "garden", "anchor")
FACT = "\n\nThe access code of the {thing} is{answer}.\n\n"
# No chat template: a plain continuation is found by the small models, too, and needs no template to be there.
QUESTION = "\n\nQuestion: What is the access code of the {thing}?\nAnswer: The access code of the {thing} is"
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+")


def needle_case(
    tokenizer: TextTokenizer, document: Document, *, context: int, seed: int, number: int
) -> Case | None:
    """The document's needle of that number, 0 to PER_DOCUMENT - 1; None where the document is too short.

    Raises UserError for a context that is too short.
    """
    name = f"needle/{document.name}/{context}/{number}"
    generator = case_generator(name, context, seed)
    thing = f"{generator.choice(ADJECTIVES)} {generator.choice(NOUNS)}"
    answer, answer_ids = _draw_answer(tokenizer, generator)
    fact = encode_piece(tokenizer, FACT.format(thing=thing, answer=answer))
    question = encode_piece(tokenizer, QUESTION.format(thing=thing))
    head = leading_ids(tokenizer)
    others = len(head) + len(fact) + len(question) + len(answer_ids)
    body = case_length(context, 2 * others) - others  # tokens of the document itself
    text = covered_text(tokenizer, document.text, body)
    place = _sentence_end(text, _draw_depth(document, number, generator))
    before = encode_piece(tokenizer, text[:place])[:body]
    after = encode_piece(tokenizer, text[place:])[: body - len(before)]
    if len(before + after) < body:
        return None
    ids = tuple(head + before + fact + after + question + answer_ids)
    return Case(name, "needle", document.name, ids, len(answer_ids))


def _draw_depth(document: Document, number: int, generator: np.random.Generator) -> float:
    """A share of the text: in another third of DEPTHS for each number, and not first in the same for all."""
    third = (name_hash(document.name) + number) % PER_DOCUMENT
    low, high = DEPTHS
    return low + (high - low) * (third + generator.uniform()) / PER_DOCUMENT


def _draw_answer(tokenizer: TextTokenizer, generator: np.random.Generator) -> tuple[str, list[int]]:
    """Five digits, with as many tokens as any other answer: cases run side by side."""
    size = len(encode_piece(tokenizer, " 48213"))
    for _ in range(1000):
        answer = f" {generator.integers(*DIGITS)}"
        ids = encode_piece(tokenizer, answer)
        if len(ids) == size:
            return answer, ids
    raise UserError(f"the tokenizer has no other number of five digits in {size} tokens")


def _sentence_end(text: str, depth: float) -> int:
    """The offset behind the sentence whose end is nearest to that share of the text; 0 where none ends."""
    ends = [found.end() for found in SENTENCE_END.finditer(text)]
    return min(ends, key=lambda end: abs(end - depth * len(text)), default=0)
