"""Perplexity of a cut model against the number of experts per token, beside the dense model it was cut from.

    python scripts/bench_moe_quality.py
    python scripts/bench_moe_quality.py --experts-per-token 8 20 --documents 8 --tokens 1024

On evaluation documents, which no cut has seen: prose and code, a text from the middle of each. Intervals are
95 %, by bootstrap over documents; the figures to go by are differences from the dense model on the same ones.
Results are kept in --work as they come: after Ctrl-C the same command goes on. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from bench_verify import git

import sv_jax
from sv_jax.checkpoints.progress import progress_bar
from sv_jax.checkpoints.registry import DERIVED
from sv_jax.config import UserError
from sv_jax.evaluation.cutting import encode_piece, leading_ids
from sv_jax.evaluation.documents import load_documents, split_of
from sv_jax.evaluation.expert_cut_model import surprise
from sv_jax.evaluation.statistics import Interval, paired_difference, ratio
from sv_jax.evaluation.store import Store, tokens_hash

VERSION = 1  # of what is measured: results of other versions are not used again
NAME = "smollm2-135m-moe"
STYLES = ("prose", "code")


class Text(NamedTuple):
    document: str
    style: str
    tokens: list[int]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=NAME, choices=list(DERIVED))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--experts-per-token", nargs="+", type=int, default=[4, 8, 12, 16, 20, 24, 32])
    parser.add_argument("--documents", type=int, default=16, help="of each style")
    parser.add_argument("--tokens", type=int, default=512, help="of a document")
    parser.add_argument("--work", type=Path, default=Path("out/moe_quality"))
    return parser.parse_args()


def evaluation_texts(tokenizer: Any, style: str, tokens: int, count: int) -> list[Text]:
    """One text each of `count` evaluation documents. Raises UserError where there are fewer."""
    first = leading_ids(tokenizer)
    texts: list[Text] = []
    for document in load_documents(style):
        if split_of(document.name) == "evaluation" and len(texts) < count:
            ids = encode_piece(tokenizer, document.text[len(document.text) // 2 :], tokens - len(first))
            if len(ids) == tokens - len(first):
                texts.append(Text(document.name, style, [*first, *ids]))
    if len(texts) < count:
        raise UserError(f"--documents {count}; allowed for {style} of {tokens} tokens: up to {len(texts)}")
    return texts


def measure(model: Any, chosen: int | None, texts: list[Text], store: Store, tick: Callable) -> list[float]:
    """-log p of each text in nats; chosen: experts per token, None: the model has none."""
    config = model.checkpoint.config
    if chosen is not None:
        config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, num_experts_per_tok=chosen))
    target = model.target.clone(config=config)
    found = []
    for text in texts:
        identity = {
            "version": VERSION,
            "model_sha256": model.checkpoint.sha256,
            "dtype": model.dtype,
            "experts_per_token": chosen,
            "text": tokens_hash(text.tokens),
        }
        nats = store.get(identity)
        if nats is None:
            nats = float(surprise(target, model.params, jnp.array([text.tokens], jnp.int32))[0])
            store.add([(identity, nats)])
        found.append(nats)
        tick()
    return found


def figures(nats: list[float], dense: list[float], texts: list[Text]) -> dict[str, dict[str, Interval]]:
    """By style and over all: perplexity, and how much more it is than the dense model's, as a share."""
    result = {}
    for style in (*STYLES, "all"):
        rows = [row for row, text in enumerate(texts) if style in (text.style, "all")]
        ours, other = ([values[row] for row in rows] for values in (nats, dense))
        predicted = [len(texts[row].tokens) - 1 for row in rows]
        documents = [texts[row].document for row in rows]
        level = ratio(ours, predicted, documents)
        more = paired_difference(ours, other, predicted, documents)
        result[style] = {
            "perplexity": Interval(*(math.exp(x) for x in dataclasses.astuple(level))),
            "more": Interval(*(math.expm1(x) for x in dataclasses.astuple(more))),
        }
    return result


def line(label: str, by_style: dict[str, dict[str, Interval]]) -> str:
    cells = [label]
    for figure in by_style.values():
        level, more = figure["perplexity"], figure["more"]
        difference = f"{more.value:+.1%} ({more.low:+.1%} .. {more.high:+.1%})"
        cells.append(f"{level.value:.2f}" + ("" if label == "dense" else f", {difference}"))
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    arguments = parse_arguments()
    model = sv_jax.load_model(arguments.model, dtype=arguments.dtype)
    dense_model = sv_jax.load_model(DERIVED[arguments.model].base, dtype=arguments.dtype)
    experts = model.checkpoint.config.moe.num_experts
    if wrong := [k for k in arguments.experts_per_token if not 1 <= k <= experts]:
        raise UserError(f"--experts-per-token {wrong[0]}; allowed: 1 to {experts}")
    texts = []
    for style in STYLES:
        texts += evaluation_texts(model.tokenizer, style, arguments.tokens, arguments.documents)
    store = Store(arguments.work / "results.jsonl")
    rows: dict[str, dict[str, dict[str, Interval]]] = {}
    passes = (1 + len(arguments.experts_per_token)) * len(texts)
    with progress_bar("perplexity", passes, "text", progress=True) as bar:
        dense = measure(dense_model, None, texts, store, bar.update)
        rows["dense"] = figures(dense, dense, texts)
        for chosen in arguments.experts_per_token:
            rows[str(chosen)] = figures(measure(model, chosen, texts, store, bar.update), dense, texts)
    print(f"| k of {experts} | " + " | ".join((*STYLES, "all")) + " |")
    print("| --- | --- | --- | --- |")
    for label, by_style in rows.items():
        print(line(label, by_style))
    result = {
        "model": model.provenance,
        "model_sha256": model.checkpoint.sha256,
        "dtype": model.dtype,
        "documents": len(texts),
        "tokens": arguments.tokens,
        "cores": os.cpu_count(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "rows": {
            label: {
                style: {name: dataclasses.astuple(interval) for name, interval in figure.items()}
                for style, figure in by_style.items()
            }
            for label, by_style in rows.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
