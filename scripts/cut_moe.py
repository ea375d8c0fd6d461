"""Cuts a dense model into shared channels and experts: makes the file that smollm2-135m-moe is derived with.

    python scripts/cut_moe.py                     # about half an hour on one core
    python scripts/cut_moe.py --output mine.safetensors --layers 6 --experts-per-token 16

From the model and calibration documents alone (evaluation/documents.py: documents that judge nothing): inputs
of all feed-forward networks -> a cut of each layer (evaluation/expert_cut.py) -> what each cut costs alone,
on other calibration documents -> the layers that cost least. Results of all steps are kept in --work: after
Ctrl-C the same command goes on. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

import sv_jax
from sv_jax.checkpoints.moe_cut import MoECut, save_cut
from sv_jax.checkpoints.progress import progress_bar
from sv_jax.checkpoints.registry import DERIVED
from sv_jax.checkpoints.safetensors_io import TensorSource
from sv_jax.config import UserError
from sv_jax.evaluation.cutting import encode_piece, leading_ids
from sv_jax.evaluation.documents import load_documents, split_of
from sv_jax.evaluation.expert_cut import CutShape, LayerCut, cut_layer, labels_of
from sv_jax.evaluation.expert_cut_model import Masks, ffn_inputs, masked_surprise
from sv_jax.evaluation.store import Store, identity_key, tokens_hash

VERSION = 1  # of all steps: what other versions left in --work is not used again
NAME = "smollm2-135m-moe"
STYLES = ("prose", "code")


@dataclasses.dataclass(frozen=True)
class Text:
    name: str  # document and where it begins, e.g. "lib/typing.py@0"
    tokens: tuple[int, ...]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", default=DERIVED[NAME].base)
    parser.add_argument("--output", type=Path, default=DERIVED[NAME].cut)
    parser.add_argument("--work", type=Path, default=Path("out/cut_moe"), help="where steps are kept")
    parser.add_argument("--layers", type=int, default=10, help="how many are cut")
    parser.add_argument("--shared", type=int, default=512, help="channels that every token uses")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--experts-per-token", type=int, default=20, help="what the model says of itself")
    parser.add_argument("--arranged-for", type=int, default=12, help="experts per token during the fit")
    parser.add_argument("--ranked-with", type=int, default=8, help="experts per token when layers are ranked")
    parser.add_argument("--rounds", type=int, default=8, help="turns of router and channels")
    parser.add_argument("--router-scale", type=float, default=0.01, help="standard deviation of logits")
    parser.add_argument("--tokens", type=int, default=512, help="of a text")
    parser.add_argument("--fit-texts", type=int, default=24, help="of each style")
    parser.add_argument("--rank-texts", type=int, default=4, help="of each style, of other documents")
    return parser.parse_args()


def calibration_texts(
    tokenizer: Any, style: str, tokens: int, fit: int, rank: int
) -> tuple[list[Text], list[Text]]:
    """`fit` and `rank` texts of so many tokens, cut from different calibration documents.

    Raises UserError where there are too few.
    """
    documents = [d for d in load_documents(style) if split_of(d.name) == "calibration"]
    first = leading_ids(tokenizer)

    def cut(documents: list, count: int) -> list[Text]:
        # Each document gives its beginning first, then its middle, and then what lies between.
        texts: list[Text] = []
        for part in (0.0, 0.5, 0.25, 0.75):
            for document in documents:
                start = int(part * len(document.text))
                ids = encode_piece(tokenizer, document.text[start:], tokens - len(first))
                if len(ids) == tokens - len(first) and len(texts) < count:
                    texts.append(Text(f"{document.name}@{start}", (*first, *ids)))
        if len(texts) < count:
            raise UserError(f"{count} {style} texts of {tokens} tokens; allowed: at most {len(texts)}")
        return texts

    return cut(documents[rank:], fit), cut(documents[:rank], rank)


def kept(path: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What `make` gives, or gave in a run before: the file is there whole or not at all."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file({name: np.ascontiguousarray(array) for name, array in make().items()}, partial)
        partial.replace(path)
    return load_file(path)


def layer_inputs(model: Any, texts: list[Text], work: Path) -> np.ndarray:
    """float16[L, N, d]: the normed inputs of all feed-forward networks, the texts one behind the other."""

    def make(text: Text) -> dict[str, np.ndarray]:
        inputs = ffn_inputs(model.target, model.params, jnp.array([text.tokens], jnp.int32))
        return {"inputs": np.asarray(inputs[:, 0])}

    parts = []
    with progress_bar("inputs of the networks", len(texts), "text", progress=True) as bar:
        for text in texts:
            path = work / f"inputs-{tokens_hash(text.tokens)}.safetensors"
            parts.append(kept(path, partial(make, text))["inputs"])
            bar.update()
    return np.concatenate(parts, axis=1)


def cut_layers(model: Any, inputs: np.ndarray, shape: CutShape, work: Path) -> list[LayerCut]:
    """The cut of every layer."""
    source = TensorSource(model.checkpoint.directory)

    def make(layer: int) -> dict[str, np.ndarray]:
        whole = (slice(None), slice(None))
        names = (f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
        weights = (source.read(name, whole).astype(np.float32) for name in names)
        return cut_layer(inputs[layer].astype(np.float32), *weights, shape)._asdict()

    cuts = []
    with progress_bar("cutting", len(inputs), "layer", progress=True) as bar:
        for layer in range(len(inputs)):
            cuts.append(LayerCut(**kept(work / f"layer-{layer}.safetensors", partial(make, layer))))
            bar.update()
    return cuts


class Ranking:
    """How much the cut of one layer costs, and of several."""

    def __init__(self, model: Any, cuts: list[LayerCut], shape: CutShape, store: Store, of: dict[str, Any]):
        """of: all that the cuts depend on."""
        self.model, self.store, self.of = model, store, of
        self.whole = shape.num_experts
        labels = [labels_of(cut.channels, shape.num_shared, shape.num_experts) for cut in cuts]
        self.labels = jnp.array(np.stack(labels), jnp.int32)
        self.router = jnp.array(np.stack([cut.router for cut in cuts]))

    def nats(self, text: Text, layers: tuple[int, ...], selected: int) -> float:
        """-log p of a text with these layers cut, `selected` experts a token."""
        identity = {**self.of, "text": tokens_hash(text.tokens), "layers": layers, "selected": selected}
        found = self.store.get(identity)
        if found is None:
            counts = [selected if layer in layers else self.whole for layer in range(len(self.labels))]
            masks = Masks(self.router, self.labels, jnp.array(counts, jnp.int32))
            tokens = jnp.array([text.tokens], jnp.int32)
            found = float(masked_surprise(self.model.target, self.model.params, tokens, masks)[0])
            self.store.add([(identity, found)])
        return found

    def costs(self, texts: list[Text], choices: list[tuple[int, ...]], selected: int) -> list[float]:
        """Nats per token that each choice of layers adds to the dense model's."""
        totals = np.zeros(1 + len(choices))
        with progress_bar("ranking", totals.size * len(texts), "run", progress=True) as bar:
            for text in texts:
                for index, layers in enumerate([(), *choices]):
                    totals[index] += self.nats(text, layers, selected)
                    bar.update()
        predicted = sum(len(text.tokens) - 1 for text in texts)
        return [float(cost) for cost in (totals[1:] - totals[0]) / predicted]


def main() -> None:
    arguments = parse_arguments()
    model = sv_jax.load_model(arguments.base, dtype="float32")
    shape = CutShape(arguments.shared, arguments.experts, arguments.arranged_for, arguments.rounds)
    fit, rank = [], []
    for style in STYLES:
        counts = (arguments.fit_texts, arguments.rank_texts)
        some, others = calibration_texts(model.tokenizer, style, arguments.tokens, *counts)
        fit, rank = fit + some, rank + others
    of = {
        "version": VERSION,
        "base_sha256": model.checkpoint.sha256,
        "fit": hashlib.sha256(json.dumps([text.tokens for text in fit]).encode()).hexdigest(),
        "shape": dataclasses.asdict(shape),
    }
    inputs = layer_inputs(model, fit, arguments.work / f"{model.checkpoint.sha256[:12]}-v{VERSION}")
    work = arguments.work / identity_key(of)
    cuts = cut_layers(model, inputs, shape, work)
    ranking = Ranking(model, cuts, shape, Store(work / "ranking.jsonl"), of)
    costs = ranking.costs(rank, [(layer,) for layer in range(len(cuts))], arguments.ranked_with)

    order = sorted(range(len(costs)), key=lambda layer: (costs[layer], layer))
    chosen = tuple(sorted(order[: arguments.layers]))
    for layer in order:
        mark = "cut" if layer in chosen else ""
        print(f"layer {layer:2d}: {costs[layer]:+.4f} nats a token {mark}", file=sys.stderr)
    cut = MoECut(
        layers=chosen,
        channels=np.stack([cuts[layer].channels for layer in chosen]),
        router=np.stack([cuts[layer].router for layer in chosen]),
        router_scale=arguments.router_scale,
        num_shared=shape.num_shared,
        experts_per_token=arguments.experts_per_token,
        base=arguments.base,
        base_sha256=model.checkpoint.sha256,
        provenance={
            "made_by": "scripts/cut_moe.py of sv_jax",
            "model": f"cut from {model.provenance}",
            "version": VERSION,
            "shape": dataclasses.asdict(shape),
            "ranked_with": arguments.ranked_with,
            "costs": [round(cost, 4) for cost in costs],
            "fit_texts": [text.name for text in fit],
            "rank_texts": [text.name for text in rank],
            "fit_sha256": of["fit"],
        },
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    save_cut(arguments.output, cut)
    size = arguments.output.stat().st_size
    print(json.dumps({"output": str(arguments.output), "bytes": size, "layers": chosen, "costs": costs}))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
