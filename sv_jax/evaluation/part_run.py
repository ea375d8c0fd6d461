"""The meter of experts and channels over many texts: results kept as soon as they are there, and rows."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sv_jax.engine.language_model import LanguageModel
from sv_jax.evaluation.cutting import Case
from sv_jax.evaluation.drift_run import checkpoint_hash
from sv_jax.evaluation.part_steps import PartMeasurement, PartSetting, measure_parts
from sv_jax.evaluation.statistics import Interval, ratio
from sv_jax.evaluation.store import Store, tokens_hash
from sv_jax.evaluation.tables import Table, interval

# Part of every key. To be raised when the measuring code finds something else: old results do not count then.
MEASURING_VERSION = 1


@dataclasses.dataclass(frozen=True)
class FreeText:
    """A text that was generated behind a case's prefix, greedily, with drafts from prompt lookup."""

    case: str
    document: str
    setting: str
    tokens: int  # that steps emitted
    steps: int
    experts: float | None  # read by these steps, over layers
    dense_experts: float | None
    weight_bytes: float | None
    dense_weight_bytes: float | None


@dataclasses.dataclass(frozen=True)
class PartRun:
    """What all results of a run have in common, and where they are kept."""

    model: LanguageModel
    store: Store
    num_speculative_tokens: int
    seed: int  # of the random controls
    static_votes: tuple[np.ndarray | None, ...] = ()  # of the static control, per layer float32[F]

    def measured(self, case: Case, setting: PartSetting) -> PartMeasurement | None:
        """The result that is kept, None if there is none yet."""
        result = self.store.get(self._identity("parts", case, setting))
        return None if result is None else PartMeasurement(**{**result, "setting": setting.name})

    def measure_missing(
        self, cases: Sequence[Case], settings: Sequence[PartSetting], *, on_result: Callable[[int], Any]
    ) -> None:
        """Measures and keeps what is not there yet; on_result(1) after each."""
        for case in cases:
            wanted = [setting for setting in settings if self.measured(case, setting) is None]
            if not wanted:
                continue
            found = measure_parts(
                self.model,
                case,
                wanted,
                num_speculative_tokens=self.num_speculative_tokens,
                seed=self.seed,
                static_votes=self.static_votes,
            )
            for setting, measurement in zip(wanted, found):
                result = dataclasses.asdict(measurement)
                self.store.add([(self._identity("parts", case, setting), result)])
                on_result(1)

    def generated(self, case: Case, setting: PartSetting | None, tokens: int) -> FreeText:
        """The text behind a case's prefix, from the store or generated now. setting None: dense."""
        identity = self._identity("generated", case, setting) | {"new_tokens": tokens}
        if (result := self.store.get(identity)) is None:
            result = dataclasses.asdict(self._generate(case, setting, tokens))
            self.store.add([(identity, result)])
        return FreeText(**{**result, "setting": "dense" if setting is None else setting.name})

    def _generate(self, case: Case, setting: PartSetting | None, tokens: int) -> FreeText:
        done = self.model.generate(
            [case.token_ids[: len(case.token_ids) - case.measured]],
            max_new_tokens=tokens,
            num_speculative_tokens=self.num_speculative_tokens,
            ignore_eos=True,
            sparsity=None if setting is None else setting.sparsity,
        )
        emitted, reads = len(done.outputs[0].token_ids) - 1, done.stats.sparse_ffn

        def total(name: str) -> float | None:
            per_token = None if reads is None else getattr(reads, name)
            return None if per_token is None else per_token * emitted

        return FreeText(
            case=case.name,
            document=case.document,
            setting="",
            tokens=emitted,
            steps=sum(done.stats.acceptance_histogram),
            experts=total("experts_per_token"),
            dense_experts=total("dense_experts_per_token"),
            weight_bytes=total("bytes_per_token"),
            dense_weight_bytes=total("dense_bytes_per_token"),
        )

    def _identity(self, measuring: str, case: Case, setting: PartSetting | None) -> dict[str, Any]:
        """Everything that the result depends on."""
        identity = {
            "measuring": measuring,
            "version": MEASURING_VERSION,
            "case": case.name,
            "tokens": tokens_hash(case.token_ids),
            "measured": case.measured,
            "sparsity": None,
            "model": checkpoint_hash(self.model.checkpoint),
            "dtype": self.model.dtype,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        if setting is not None:
            parts = dataclasses.asdict(dataclasses.replace(setting.sparsity, provenance=()))
            identity |= {"sparsity": parts, "control": setting.control}
            if setting.control == "random":
                identity["seed"] = self.seed
            if setting.control == "static":
                kept = b"".join(votes.tobytes() for votes in self.static_votes if votes is not None)
                identity["votes"] = hashlib.sha256(kept).hexdigest()
        return identity


@dataclasses.dataclass(frozen=True)
class PartRow:
    """One setting over all texts. Experts are those of a layer and step."""

    setting: str
    documents: int
    positions: int
    agreement: Interval  # with the dense pass's most likely token
    kl: Interval  # nats a position
    perplexity: float
    dense_perplexity: float
    excess: Interval  # nats a position more than dense: the log of the ratio of perplexities
    experts: float | None  # read by a step, over layers
    dense_experts: float | None
    kept_pairs: float | None  # of the routers' choices
    density: float | None  # channels that a token uses
    union: float | None  # channels that some token of a step uses
    weights: float  # feed-forward weights read, of what dense reads

    @property
    def ratio(self) -> float:
        return self.perplexity / self.dense_perplexity


def part_row(group: Sequence[PartMeasurement]) -> PartRow:
    """The row of one setting's results."""
    documents, positions = [m.document for m in group], [m.positions for m in group]
    total, steps = sum(positions), sum(m.steps for m in group)

    def sums(name: str) -> list[float] | None:
        parts = [getattr(m, name) for m in group]
        return None if parts[0] is None else [sum(column) for column in zip(*parts)]

    experts, channels = sums("experts"), sums("channels")
    return PartRow(
        setting=group[0].setting,
        documents=len(set(documents)),
        positions=total,
        agreement=ratio([m.agreeing for m in group], positions, documents),
        kl=ratio([m.kl for m in group], positions, documents),
        perplexity=math.exp(sum(m.nll for m in group) / total),
        dense_perplexity=math.exp(sum(m.dense_nll for m in group) / total),
        excess=ratio([m.nll - m.dense_nll for m in group], positions, documents),
        experts=None if experts is None else experts[0] / steps,
        dense_experts=None if experts is None else experts[1] / steps,
        kept_pairs=None if experts is None else experts[2] / experts[3],
        density=None if channels is None else channels[0] / channels[1],
        union=None if channels is None else channels[2] / channels[3],
        weights=sum(m.weight_channels for m in group) / sum(m.dense_weight_channels for m in group),
    )


def part_table(rows: Sequence[PartRow], generated: dict[str, list[FreeText]]) -> Table:
    """generated: texts by setting, "dense" among them; {} where none were."""
    headings = ["setting", "agreement", "KL", "perplexity", "of dense"]
    experts = any(row.experts is not None for row in rows)
    channels = any(row.density is not None for row in rows)
    headings += ["experts a step", "of wanted", "choices kept"] if experts else []
    headings += ["channels a token", "a step"] if channels else []
    headings += ["FFN bytes", *(["tokens a step"] if generated else [])]
    headings += ["experts a token"] if generated and experts else []
    lines = []
    for row in rows:
        low, high = (math.exp(x) for x in (row.excess.low, row.excess.high))
        line = [row.setting, interval(row.agreement), interval(row.kl, 4), f"{row.perplexity:.2f}"]
        line.append(f"{row.ratio:.3f} [{low:.3f}, {high:.3f}]")
        if experts:
            line += [_cell(row.experts, 1), _share(row.experts, row.dense_experts), _cell(row.kept_pairs, 2)]
        if channels:
            line += [_cell(row.density, 2), _cell(row.union, 2)]
        line.append(f"{row.weights:.2f}")
        if generated:
            texts = generated.get(row.setting, [])
            line.append(interval(acceptance(texts), 2) if texts else "")
            if experts:
                read = [text.experts for text in texts if text.experts is not None]
                line.append(f"{sum(read) / sum(text.tokens for text in texts):.1f}" if read else "")
        lines.append(line)
    return headings, lines


def acceptance(texts: Sequence[FreeText]) -> Interval:
    """Tokens a step."""
    return ratio([t.tokens for t in texts], [t.steps for t in texts], [t.document for t in texts])


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _share(value: float | None, whole: float | None) -> str:
    return "" if value is None or not whole else f"{100 * value / whole:.0f} %"
