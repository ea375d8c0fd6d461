"""Tokenizers of the two kinds that models have, trained in a moment on the pages of tests/data."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

PAGES = Path(__file__).parent.parent / "data" / "pages"


def pages() -> dict[str, str]:
    return {path.stem: path.read_bytes().decode() for path in sorted(PAGES.glob("*.txt"))}


@functools.cache
def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3, Qwen: tokens are bytes, merged without regard to characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken("<|end|>", special=True)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(pages().values(), trainer)
    return tokenizer


@functools.cache
def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: tokens are characters, merged; rare ones are single bytes."""
    prose = pages()["prose"]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([prose], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    merges = [tuple(pair) for pair in _bpe(trained)["merges"]]
    words = [f"<0x{byte:02X}>" for byte in range(256)] + list(_bpe(trained)["vocab"])
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _bpe(tokenizer: tokenizers.Tokenizer) -> dict:
    return json.loads(tokenizer.to_str())["model"]
