"""From texts to anchors: measures what reuse costs, chooses anchors, and measures what they really cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sv_jax.checkpoints.progress import progress_bar
from sv_jax.config import UserError
from sv_jax.engine.decoding import padded_batch
from sv_jax.engine.language_model import LanguageModel
from sv_jax.evaluation.anchors import (
    Windows,
    allowed_pairs,
    best_choices,
    choose,
    cost_matrix,
    even_anchors,
    fewest_anchors,
)
from sv_jax.evaluation.calibration import (
    Pair,
    StepFigures,
    Totals,
    own_source,
    pair_source,
    selecting_plan,
    sources_of,
    step_numbers,
    sweep,
    total,
)
from sv_jax.evaluation.drift_run import checkpoint_hash
from sv_jax.evaluation.store import Store, tokens_hash
from sv_jax.evaluation.texts import Case
from sv_jax.evaluation.true_steps import split_case
from sv_jax.sparsity.config import AttentionSparsity

VERSION = 2  # of what is measured and how: figures of other versions are not used again


@dataclasses.dataclass(frozen=True)
class CalibrationSettings:
    """How anchors and dense layers are chosen.

    method: "damage": reuse costs max(D[a, l], 0) nats; "jaccard": 1 - J[a, l]. See `calibration`.
    reach: how many layers before a layer its anchor may lie.
    max_anchors: None: half of the layers, rounded down.
    tolerance: damage: nats of predicted KL that may come from reuse; jaccard: similarity of what layers read
      to what they would select, mean over all layers, anchors included.
    max_dense_layers: most layers that read everything.
    dense_gain: a layer is one of them if that takes away at least this share of the KL.
    """

    attention: AttentionSparsity
    method: str
    num_speculative_tokens: int
    reach: int
    max_anchors: int | None
    tolerance: float
    batch_size: int
    max_dense_layers: int
    dense_gain: float

    def most_anchors(self, layers: int) -> int:
        return max(layers // 2, 1) if self.max_anchors is None else self.max_anchors


class Variant(NamedTuple):
    """Anchors, and what they cost on the texts."""

    anchors: tuple[int, ...]
    kl: float  # mean KL(dense || sparse) in nats
    agreement: float  # share of positions with the dense pass's most likely token


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was found.

    predicted: cost by number of anchors, of the best ones.
    chosen_cost: what `settings.method` predicted for the chosen anchors.
    every_layer: no layer is dense, all select. selecting: all but the dense ones do.
    dense_layers: in the order in which they were found.
    sources: per layer, the layer whose set it reads, or DENSE.
    damage, jaccard: of each layer and its source, None for an anchor, and where it was not measured.
    """

    positions: int
    predicted: dict[int, float]
    chosen_cost: float
    dense_layers: tuple[int, ...]
    every_layer: Variant
    selecting: Variant
    chosen: Variant
    even: Variant
    sources: tuple[int, ...]
    damage: tuple[float | None, ...]
    jaccard: tuple[float | None, ...]


def check_layers(settings: CalibrationSettings, windows: Windows) -> None:
    """Raises UserError where no choice of anchors has so few of them that it is allowed."""
    most, fewest = settings.most_anchors(len(windows)), fewest_anchors(windows, settings.reach)
    if most < fewest:
        raise UserError(
            f"max-anchors {most} with reach {settings.reach}; allowed for the {len(windows)} layers of this "
            f"model: at least {fewest}, or a longer reach"
        )
    if settings.max_dense_layers >= len(windows):
        raise UserError(
            f"max-dense-layers {settings.max_dense_layers}; allowed for the {len(windows)} layers of this "
            f"model: up to {len(windows) - 1}"
        )


def check_budget(settings: CalibrationSettings, case: Case) -> None:
    """Raises UserError where a head has no choice among the blocks before a case's first step."""
    attention = settings.attention
    length, _ = split_case(len(case.token_ids), case.measured, settings.num_speculative_tokens + 1)
    l0, rho = attention.budget
    tokens = min(length, l0) + math.floor(max(length - l0, 0) * rho)
    held, budget = (-(-count // attention.block_size) for count in (length, tokens))
    always = attention.sink_blocks + attention.local_blocks
    if not always < budget < held:
        raise UserError(
            f"{length} tokens of context are {held} blocks, of which {always} are always read and "
            f"{min(max(budget, always), held)} altogether: nothing is left to be chosen; "
            "allowed: a longer context, smaller blocks, another share that is kept"
        )


def layer_windows(model: LanguageModel) -> dict[int, int | None]:
    config = model.target.config
    return {layer: config.sliding_window(layer) for layer in range(config.num_layers)}


def calibrate(
    model: LanguageModel,
    cases: Sequence[Case],
    settings: CalibrationSettings,
    store: Store,
    *,
    progress: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> Calibration | None:
    """Measures, chooses and verifies. None: interrupted; what was measured is in the store.

    Args:
      cases: all of one length and with as many measured tokens.

    Raises:
      UserError: see `check_layers`, `check_budget`.
    """
    windows = layer_windows(model)
    check_layers(settings, windows)
    check_budget(settings, cases[0])
    layers = len(windows)
    runner = _Runner(model, cases, settings, store, progress, should_stop)
    found = _find_dense_layers(runner, windows)
    if found is None:
        return None
    dense, every_layer = found
    windows = _without(windows, dense)
    pairs = allowed_pairs(windows, settings.reach)

    substituted = [pair_source(pair, layers, dense) for pair in pairs] if settings.method == "damage" else []
    reuse = runner.measure("measuring reuse", [own_source(layers, dense), *substituted], pairs)
    if reuse is None:
        return None
    damage = reuse.kl[1:] - reuse.kl[0]
    costs = np.maximum(damage, 0) if settings.method == "damage" else 1 - reuse.jaccard
    choices = best_choices(cost_matrix(layers, pairs, costs.tolist()), windows)
    best = choose(choices, most=settings.most_anchors(layers), tolerated=_tolerated(settings, len(windows)))

    evenly = even_anchors(windows, len(best.anchors))
    attention = dataclasses.replace(settings.attention, dense_layers=dense)
    sources = [sources_of(anchors, attention, model.target.config) for anchors in (best.anchors, evenly)]
    verified = runner.measure("measuring the chosen anchors", sources, ())
    if verified is None:
        return None
    selecting = _variant(tuple(windows), reuse, 0)
    return Calibration(
        positions=reuse.positions,
        predicted={number: choices[number].cost for number in sorted(choices)},
        chosen_cost=best.cost,
        dense_layers=dense,
        every_layer=selecting if every_layer is None else every_layer,
        selecting=selecting,
        chosen=_variant(best.anchors, verified, 0),
        even=_variant(evenly, verified, 1),
        sources=tuple(sources[0].tolist()),
        damage=_by_layer(sources[0], pairs, damage),
        jaccard=_by_layer(sources[0], pairs, reuse.jaccard),
    )


def _without(windows: Windows, dense: Sequence[int]) -> dict[int, int | None]:
    return {layer: window for layer, window in windows.items() if layer not in dense}


def _find_dense_layers(runner: _Runner, windows: Windows) -> tuple[tuple[int, ...], Variant | None] | None:
    """The layers in which leaving blocks out does most of the damage, one after the other.

    Each is the one that takes away most of the KL when it reads everything, given those found before; the
    search ends with one that takes away less than `dense_gain` of it.

    Returns:
      The layers, and what it costs that none is dense (None: not measured); None where interrupted.
    """
    settings, layers = runner.settings, len(windows)
    dense: tuple[int, ...] = ()
    every_layer = None
    for number in range(1, settings.max_dense_layers + 1):
        candidates = [
            layer
            for layer in _without(windows, dense)
            if fewest_anchors(_without(windows, (*dense, layer)), settings.reach)
            <= settings.most_anchors(layers)
        ]
        sources = [own_source(layers, dense), *(own_source(layers, (*dense, layer)) for layer in candidates)]
        totals = runner.measure(f"measuring dense layers, choice {number}", sources, ())
        if totals is None:
            return None
        if every_layer is None:
            every_layer = _variant(tuple(windows), totals, 0)
        before, after = totals.kl[0], np.min(totals.kl[1:], initial=np.inf)
        if after > (1 - settings.dense_gain) * before:
            break
        dense = (*dense, candidates[int(np.argmin(totals.kl[1:]))])
    return dense, every_layer


def _tolerated(settings: CalibrationSettings, layers: int) -> float:
    """The predicted cost that is good enough."""
    return settings.tolerance if settings.method == "damage" else (1 - settings.tolerance) * layers


def _variant(anchors: tuple[int, ...], totals: Totals, index: int) -> Variant:
    return Variant(anchors, float(totals.kl[index]), float(totals.agreement[index]))


def _by_layer(source: np.ndarray, pairs: Sequence[Pair], values: np.ndarray) -> tuple[float | None, ...]:
    of_pair = dict(zip(pairs, values.tolist()))
    return tuple(of_pair.get((anchor, layer)) for layer, anchor in enumerate(source.tolist()))


class _Runner:
    """Sweeps whose steps are kept in a store, and are not measured again."""

    def __init__(
        self,
        model: LanguageModel,
        cases: Sequence[Case],
        settings: CalibrationSettings,
        store: Store,
        progress: bool,
        should_stop: Callable[[], bool],
    ) -> None:
        self.model, self.cases, self.settings, self.store = model, cases, settings, store
        self.progress, self.should_stop = progress, should_stop
        self.plan = selecting_plan(settings.attention, model.target.config)
        self.batch_size = padded_batch(min(len(cases), settings.batch_size), model.sharding.data_size)

    def measure(self, what: str, sources: Sequence[np.ndarray], pairs: Sequence[Pair]) -> Totals | None:
        """The means over all steps; None: interrupted."""
        steps = step_numbers(self.cases, self.settings.num_speculative_tokens, self.batch_size)
        identities = {at: self._identity(*at, sources, pairs) for at in steps}
        found: dict[tuple[int, int], StepFigures] = {}
        for at, identity in identities.items():
            if (kept := self.store.get(identity)) is not None:
                found[at] = StepFigures(*at, **kept)
        missing = (len(steps) - len(found)) * len(sources)
        if missing:
            with progress_bar(what, missing, "sparse step", progress=self.progress) as bar:
                for figures in sweep(
                    self.model,
                    self.cases,
                    self.plan,
                    sources,
                    pairs=pairs,
                    num_speculative_tokens=self.settings.num_speculative_tokens,
                    batch_size=self.batch_size,
                    known=tuple(found),
                    should_stop=self.should_stop,
                    on_pass=bar.update,
                ):
                    at = (figures.batch, figures.step)
                    result = {k: v for k, v in figures._asdict().items() if k not in ("batch", "step")}
                    self.store.add([(identities[at], result)])
                    found[at] = figures
        return total(found.values()) if len(found) == len(steps) else None

    def _identity(
        self, batch: int, step: int, sources: Sequence[np.ndarray], pairs: Sequence[Pair]
    ) -> dict[str, Any]:
        """Everything that the figures of a step depend on."""
        model, first = self.model, batch * self.batch_size
        return {
            "calibration": VERSION,
            "model": model.name,
            "weights": checkpoint_hash(model.checkpoint),
            "dtype": model.dtype,
            "platform": model.sharding.platform,
            "jax": jax.__version__,
            "attention": dataclasses.asdict(self.settings.attention),
            "num_speculative_tokens": self.settings.num_speculative_tokens,
            "texts": [tokens_hash(c.token_ids) for c in self.cases[first : first + self.batch_size]],
            "measured": self.cases[0].measured,
            "step": step,
            "sources": [source.tolist() for source in sources],
            "pairs": [list(pair) for pair in pairs],
        }
