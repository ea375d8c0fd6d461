"""A tokenizer that needs no files, and documents to cut: for the tests of texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sv_jax.evaluation.documents import Document, Split, Style, split_of

TOKEN = re.compile(r" ?[A-Za-z]+|\d|\s|[^\w\s]")
BOS = 0


class WordTokenizer:
    """Words with the space before them, single digits and signs. bos: a text begins with a token more."""

    def __init__(self, *, bos: bool = False) -> None:
        self.bos = bos
        self.ids: dict[str, int] = {"": BOS}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [self.ids.setdefault(token, len(self.ids)) for token in TOKEN.findall(text)]
        return [BOS, *ids] if self.bos and add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        texts = list(self.ids)
        return "".join(texts[i] for i in token_ids)


def make_document(name: str, style: Style = "prose", *, paragraphs: int = 40) -> Document:
    """About 45 tokens a paragraph, no two of them alike."""
    generator = np.random.default_rng(len(name) + sum(name.encode()))
    letters = np.array(list("abcdefghij"))
    lines = []
    for _ in range(paragraphs):
        words = ["".join(generator.choice(letters, 6)) for _ in range(40)]
        words[19] += "."
        lines.append(" ".join(words) + ".\n\n")
    return Document(name, style, "".join(lines))


def documents_of(split: Split, count: int, **options) -> list[Document]:
    names = [name for name in (f"document-{i}" for i in range(100)) if split_of(name) == split]
    return [make_document(name, **options) for name in names[:count]]
