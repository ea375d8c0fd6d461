"""GGUF metadata -> tokenizer.json and tokenizer_config.json, built with `tokenizers`.

Two kinds of vocabulary are known: byte-level BPE ("gpt2"), where the file names how text is split before
merging, and SentencePiece BPE ("llama"), whose merges follow from the scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from sv_jax.config import UserError

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # llama.cpp's token types

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@dataclasses.dataclass(frozen=True)
class Splitting:
    """How byte-level text is cut before merging.

    regex: the model's own split, or None for GPT-2's. digits: cut out every digit first.
    nfc: normalise first. whole_words: take a word that is in the vocabulary whole, merges or not.
    adds_bos: what llama.cpp does when the file has no add_bos_token.
    """

    regex: str | None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


SPLITTINGS: dict[str, Splitting] = {
    "smollm": Splitting(None, digits=True),
    "gpt-2": Splitting(None),
    "qwen2": Splitting(QWEN2_SPLIT, nfc=True),
    "deepseek-r1-qwen": Splitting(QWEN2_SPLIT, nfc=True),
    "llama-bpe": Splitting(LLAMA3_SPLIT, whole_words=True, adds_bos=True),
}


def build(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, tokenizer_config.json) of a GGUF file.

    Raises UserError for a vocabulary of another kind or a split that is not in the table.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if model not in ("gpt2", "llama") or not tokens:
        raise UserError(
            f"GGUF tokenizer {model!r} is not supported; allowed: gpt2 (byte-level BPE), llama (SPM)"
        )
    types = list(metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens))
    # Unused ids only pad the embedding; naming them would let decode print "[PAD151700]".
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    tokenizer, adds_bos = (_byte_level if model == "gpt2" else _sentencepiece)(metadata, vocab)
    _mark_added(tokenizer, tokens, types)
    config = _special_tokens(metadata, tokens)
    config["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and bool(
        config.get("bos_token")
    )
    config["add_eos_token"] = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and bool(
        config.get("eos_token")
    )
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    _set_template(tokenizer, config)
    return tokenizer, config


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in SPLITTINGS:
        raise UserError(
            f"GGUF pre-tokenizer {name!r} is not supported; allowed: {', '.join(SPLITTINGS)} (else use a "
            "Hugging Face directory, whose tokenizer.json is read as it is)"
        )
    how = SPLITTINGS[name]
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=how.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if how.digits else []
    if how.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(how.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=how.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if how.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, how.adds_bos


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise UserError("GGUF tokenizer 'llama' lacks tokenizer.ggml.scores, from which its merges follow")
    unknown = metadata["tokenizer.ggml.tokens"][int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    merges = merges_from_scores(vocab, {token: float(scores[index]) for token, index in vocab.items()})
    tokenizer = Tokenizer(
        BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def merges_from_scores(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The BPE merges that join two pieces exactly when SentencePiece would: best score first."""
    merges = []
    for piece, score in scores.items():
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in splits if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(left, right, score) for left, right in known]
    # Python's sort is stable, so among equal scores the vocabulary's order decides.
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in merges]


def _mark_added(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are matched whole in the text; only control ones are 'special'."""
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [token for token, its in zip(tokens, types) if its == kind]
        added = [AddedToken(token, normalized=False, special=special) for token in chosen]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {
        name: tokens[int(index)] for name, index in ids.items() if index is not None and index < len(tokens)
    }


def _set_template(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Make `tokenizer` add BOS and EOS exactly as add_bos_token and add_eos_token of `config` say."""
    before = [config["bos_token"]] if config.get("add_bos_token") and config.get("bos_token") else []
    after = [config["eos_token"]] if config.get("add_eos_token") and config.get("eos_token") else []
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B", *after], special_tokens=special
    )
