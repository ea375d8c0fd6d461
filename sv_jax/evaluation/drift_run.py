"""Drift over many cases: batch by batch, each result kept as soon as it is there, none measured twice."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from sv_jax.checkpoints.resolve import Checkpoint
from sv_jax.engine.language_model import LanguageModel
from sv_jax.evaluation.cutting import Case
from sv_jax.evaluation.drift import DriftSetting, Measurement, measure
from sv_jax.evaluation.free_running import FreeRun, run_freely
from sv_jax.evaluation.store import Store, tokens_hash

# Part of every key. To be raised when the measuring code finds something else: old results do not count then.
MEASURING_VERSION = 2


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """Which weights these are: their file's hash where it is known, else names, sizes and times of files."""
    if checkpoint.sha256:
        return checkpoint.sha256[:16]
    digest = hashlib.sha256()
    for path in sorted(checkpoint.directory.iterdir()):
        if path.suffix in (".safetensors", ".json"):
            status = path.stat()
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class DriftRun:
    """What all results of a run have in common, and where they are kept.

    batch_size: cases that run side by side; a multiple of the mesh's data axis.
    seed: of the random control.
    """

    model: LanguageModel
    store: Store
    num_speculative_tokens: int
    seed: int
    batch_size: int

    def measured(self, case: Case, setting: DriftSetting) -> Measurement | None:
        """The result that is kept, None if there is none yet."""
        result = self.store.get(self._identity(case, setting))
        return None if result is None else Measurement(**{**result, "setting": setting})

    def missing(self, cases: Sequence[Case], settings: Sequence[DriftSetting]) -> int:
        return sum(self.measured(case, setting) is None for case in cases for setting in settings)

    def measure_missing(
        self, cases: Sequence[Case], settings: Sequence[DriftSetting], *, on_results: Callable[[int], object]
    ) -> None:
        """Measures and keeps what is not there yet. Calls on_results(results added) after each addition.

        Args:
          cases: all of one length and with as many measured tokens.
        """
        for first in range(0, len(cases), self.batch_size):
            batch = cases[first : first + self.batch_size]
            wanted = [s for s in settings if any(self.measured(case, s) is None for case in batch)]
            if not wanted:
                continue
            # A smaller last batch would be another program: its compilation takes longer than the rows.
            full = [*batch, *[batch[-1]] * (self.batch_size - len(batch))]
            k, seed = self.num_speculative_tokens, self.seed
            for measurements in measure(self.model, full, wanted, num_speculative_tokens=k, seed=seed):
                pairs = zip(batch, measurements)
                new = [(case, m) for case, m in pairs if self.measured(case, m.setting) is None]
                self.store.add([(self._identity(case, m.setting), _result(m)) for case, m in new])
                on_results(len(new))

    def ran_freely(self, case: Case, setting: DriftSetting, num_tokens: int) -> FreeRun | None:
        result = self.store.get(self._free_identity(case, setting, num_tokens))
        return None if result is None else FreeRun(**{**result, "setting": setting})

    def run_freely_missing(
        self,
        cases: Sequence[Case],
        settings: Sequence[DriftSetting],
        num_tokens: int,
        *,
        on_results: Callable[[int], object],
    ) -> None:
        """Generates and keeps what is not there yet, case by case; as `measure_missing`."""
        for case in cases:
            wanted = [s for s in settings if self.ran_freely(case, s, num_tokens) is None]
            runs = run_freely(
                self.model,
                case,
                wanted,
                num_tokens=num_tokens,
                num_speculative_tokens=self.num_speculative_tokens,
            )
            for run in runs:
                self.store.add([(self._free_identity(case, run.setting, num_tokens), _result(run))])
                on_results(1)

    def _identity(self, case: Case, setting: DriftSetting, measuring: str = "drift") -> dict[str, Any]:
        """Everything that the result depends on."""
        attention = dataclasses.asdict(setting.attention)
        del attention["score"]  # the selector stands in its place
        identity = {
            "measuring": measuring,
            "version": MEASURING_VERSION,
            "case": case.name,
            "tokens": tokens_hash(case.token_ids),
            "measured": case.measured,
            "selector": setting.selector,
            "attention": attention,
            "model": checkpoint_hash(self.model.checkpoint),
            "dtype": self.model.dtype,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        if setting.selector == "random":
            identity["seed"] = self.seed
        return identity

    def _free_identity(self, case: Case, setting: DriftSetting, num_tokens: int) -> dict[str, Any]:
        return {**self._identity(case, setting, "free running"), "num_tokens": num_tokens}


def _result(measurement: Measurement | FreeRun) -> dict[str, Any]:
    """A result without its setting, which is in its identity."""
    result = dataclasses.asdict(measurement)
    del result["setting"]
    return result
