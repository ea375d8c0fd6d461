"""What a calibration found, for a person and for the file that it writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax

from sv_jax.engine.language_model import LanguageModel
from sv_jax.evaluation.calibration import DENSE
from sv_jax.evaluation.calibration_run import Calibration, CalibrationSettings
from sv_jax.evaluation.texts import Case

UNITS = {"damage": "KL in nats", "jaccard": "lack of Jaccard similarity"}


def report(calibration: Calibration, settings: CalibrationSettings) -> list[str]:
    """Anchors, what was predicted for each number of them, and what the chosen ones cost."""
    layers, anchors = len(calibration.sources), calibration.chosen.anchors
    dense = calibration.dense_layers
    most = settings.most_anchors(layers)
    predicted = [f"{number}: {cost:.3g}" for number, cost in calibration.predicted.items() if number <= most]
    variants = [("every layer selects", calibration.every_layer)]
    if dense:
        variants.append((f"but {_listed(dense)}, dense", calibration.selecting))
    variants += [
        (f"{len(anchors)} chosen anchors", calibration.chosen),
        (f"{len(anchors)} evenly spaced anchors", calibration.even),
    ]
    return [
        *([f"layers that read everything: {_listed(dense)} ({len(dense)} of {layers})"] if dense else []),
        f"anchors: {_listed(anchors)} ({len(anchors)} of {layers} layers)",
        f"cost of reuse that was predicted, {UNITS[settings.method]}, by number of anchors: "
        + ", ".join(predicted),
        f"{calibration.positions} positions, against dense verification:",
        f"  {'':<24} {'KL (nats)':>10} {'same top-1':>11}",
        *(f"  {name:<24} {v.kl:>10.4f} {100 * v.agreement:>9.1f} %" for name, v in variants),
        f"  evenly spaced anchors were {_listed(calibration.even.anchors)}",
    ]


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def layer_table(calibration: Calibration) -> list[str]:
    """Per layer: whose blocks it reads, and what that costs."""
    lines = ["layer  reads the blocks of  damage (nats)  Jaccard"]
    columns = (calibration.sources, calibration.damage, calibration.jaccard)
    for layer, (source, damage, similarity) in enumerate(zip(*columns)):
        of = {layer: "its own", DENSE: "everything"}.get(source, str(source))
        costs = ["" if x is None else f"{x:{form}}" for x, form in ((damage, ".5f"), (similarity, ".3f"))]
        lines.append(f"{layer:>5}  {of:>19}  {costs[0]:>13}  {costs[1]:>7}".rstrip())
    return lines


def provenance(
    calibration: Calibration,
    settings: CalibrationSettings,
    model: LanguageModel,
    cases: Sequence[Case],
    *,
    context: int,
    seed: int,
) -> dict[str, Any]:
    """Where the anchors come from. None: unknown, or of no meaning."""
    figures = {
        f"{name}_{what}": round(getattr(variant, what), 6)
        for name, variant in (
            ("every_layer", calibration.every_layer),
            *([("with_dense_layers", calibration.selecting)] if calibration.dense_layers else []),
            ("anchors", calibration.chosen),
            ("even_anchors", calibration.even),
        )
        for what in ("kl", "agreement")
    }
    return {
        "model": model.name,
        "model_sha256": model.checkpoint.sha256,
        "dtype": model.dtype,
        "method": settings.method,
        "tolerance": settings.tolerance,
        "max_anchors": settings.most_anchors(len(calibration.sources)),
        "reach": settings.reach,
        "max_dense_layers": settings.max_dense_layers,
        "dense_gain": settings.dense_gain,
        "num_speculative_tokens": settings.num_speculative_tokens,
        "context": context,
        "seed": seed,
        "positions": calibration.positions,
        **figures,
        "predicted_cost": round(calibration.chosen_cost, 6),
        "texts": [case.name for case in cases],
        "texts_sha256": hashlib.sha256(json.dumps([case.token_ids for case in cases]).encode()).hexdigest(),
        "jax": jax.__version__,
    }
