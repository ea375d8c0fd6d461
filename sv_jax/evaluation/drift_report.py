"""All that a run of the drift meter has to say, in three forms: for a terminal, in Markdown, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sv_jax.evaluation.cutting import Case
from sv_jax.evaluation.drift import DriftSetting
from sv_jax.evaluation.drift_run import MEASURING_VERSION, DriftRun, checkpoint_hash
from sv_jax.evaluation.free_running import runnable
from sv_jax.evaluation.report import (
    Difference,
    DriftRow,
    FreeRow,
    as_document,
    differences,
    drift_rows,
    free_rows,
)
from sv_jax.evaluation.tables import (
    LEGEND,
    Table,
    difference_table,
    drift_table,
    free_table,
    layers_label,
    markdown,
    terminal,
)


@dataclasses.dataclass(frozen=True)
class DriftReport:
    title: str  # model and what all results have in common
    header: dict[str, Any]  # the same for programs
    rows: list[DriftRow]
    differences: list[Difference]
    free: list[FreeRow]
    progress: str  # "12 of 96"

    def _tables(self) -> list[tuple[str, Table]]:
        tables = [("Dense and sparse verification on the same prefixes", drift_table(self.rows))]
        if self.differences:
            tables.append(("Against a plain window of the same size", difference_table(self.differences)))
        if self.free:
            tables.append(("Generated texts beside dense verification's", free_table(self.free)))
        return tables

    def terminal(self) -> list[str]:
        lines = [self.title]
        for heading, table in self._tables():
            lines += ["", heading, *terminal(table)]
        return [*lines, "", LEGEND]

    def markdown(self) -> list[str]:
        lines = ["# Drift of sparse verification", "", self.title, ""]
        for heading, table in self._tables():
            lines += [f"## {heading}", "", *markdown(table), ""]
        return [*lines, LEGEND]

    def document(self) -> dict[str, Any]:
        """One JSON value; an interval is [value, low, high], NaN where it is not known."""
        rows = [{**as_document(row), "share": row.share} for row in self.rows]
        return {
            **self.header,
            "rows": rows,
            "differences": as_document(self.differences),
            "free_running": as_document(self.free),
        }


def make_report(
    run: DriftRun, groups: Sequence[Sequence[Case]], settings: Sequence[DriftSetting], *, free_tokens: int
) -> DriftReport:
    """The report of what is measured so far.

    Args:
      free_tokens: of each generated text; 0: none were.
    """
    wanted = [(case, setting) for cases in groups for setting in settings for case in cases]
    found = [m for case, setting in wanted if (m := run.measured(case, setting)) is not None]
    free = [
        freely
        for cases in groups
        for setting in (runnable(settings) if free_tokens else [])
        for case in cases
        if (freely := run.ran_freely(case, setting, free_tokens)) is not None
    ]
    model = run.model
    common = [model.provenance, model.dtype, f"{run.num_speculative_tokens + 1} tokens a step"]
    if layers := "; ".join(dict.fromkeys(layers_label(s.attention) for s in settings)):
        common.append(layers)
    header = {
        "model": model.provenance,
        "weights": checkpoint_hash(model.checkpoint),
        "dtype": model.dtype,
        "num_speculative_tokens": run.num_speculative_tokens,
        "seed": run.seed,
        "measuring_version": MEASURING_VERSION,
        "complete": len(found) == len(wanted),
    }
    return DriftReport(
        title="; ".join(common),
        header=header,
        rows=drift_rows(found),
        differences=differences(found),
        free=free_rows(free),
        progress=f"{len(found)} of {len(wanted)}",
    )
