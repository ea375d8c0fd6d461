"""Measurements as tables: for a terminal, and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sv_jax.evaluation.report import BASELINE, Difference, DriftRow, FreeRow
from sv_jax.evaluation.statistics import Interval
from sv_jax.sparsity.config import AttentionSparsity

if TYPE_CHECKING:
    from sv_jax.evaluation.drift import DriftSetting

Table = tuple[list[str], list[list[str]]]  # headings, rows
KEYS = ["kind", "context", "block", "keep", "selector"]
LEGEND = (
    "context: tokens of a text. agreement: share of positions at which dense and sparse verification have "
    "one most likely token. KL: of the sparse law from the dense one, nats a position. prefix: positions "
    "before the first disagreement. In brackets: 95 % intervals, bootstrap over documents. kB: K, V and "
    "block summaries that a step reads for a row. share: of what a dense step reads."
)


def budget_label(attention: AttentionSparsity) -> str:
    if attention.keep is not None and not attention.l0:
        return f"{attention.keep:g}"
    l0, rho = attention.budget
    return f"{l0}+{rho:g}"  # tokens of which all are kept, and the share beyond


def layers_label(attention: AttentionSparsity) -> str:
    """Which layers select, in words; "" where all do."""
    parts = []
    for name, layers in (("anchors", attention.anchors), ("dense layers", attention.dense_layers)):
        if layers:
            parts.append(f"{name} {','.join(map(str, layers))}")
    return "; ".join(parts)


def interval(value: Interval, digits: int = 3) -> str:
    """ "0.912 [0.874, 0.943]"; "-" for a bound that is not known."""
    return f"{_number(value.value, digits)} [{_number(value.low, digits)}, {_number(value.high, digits)}]"


def _number(value: float, digits: int) -> str:
    # Adding 0 takes the sign from what was rounded to -0.
    return f"{round(value, digits) + 0.0:.{digits}f}" if math.isfinite(value) else "-"


def _keys(kind: str, context: int, setting: DriftSetting) -> list[str]:
    attention = setting.attention
    return [kind, str(context), str(attention.block_size), budget_label(attention), setting.selector]


def drift_table(rows: Sequence[DriftRow]) -> Table:
    """The needles' column is there where there are needles."""
    needles = any(row.found is not None for row in rows)
    headings = [*KEYS, "cases", "agreement", "KL", "prefix", *(["found (dense)"] if needles else [])]
    lines = []
    for row in rows:
        line = _keys(row.kind, row.context, row.setting)
        line += [
            str(row.cases),
            interval(row.agreement),
            interval(row.kl, 4),
            interval(row.agreeing_prefix, 1),
        ]
        if needles:
            found = row.found and f"{interval(row.found, 2)} ({row.dense_found:.2f})"
            line.append(found or "")
        lines.append([*line, f"{row.kv_bytes / 1000:,.0f}", f"{100 * row.share:.0f} %"])
    return [*headings, "kB", "share"], lines


def difference_table(found: Sequence[Difference]) -> Table:
    headings = [*KEYS, f"agreement less {BASELINE}'s", f"KL less {BASELINE}'s"]
    lines = [[*_keys(d.kind, d.context, d.setting), interval(d.agreement), interval(d.kl, 4)] for d in found]
    return headings, lines


def free_table(rows: Sequence[FreeRow]) -> Table:
    """Generated texts beside those of dense verification."""
    headings = [*KEYS, "cases", "same tokens", "of", "identical", "tokens a step", "dense", "bytes a token"]
    lines = []
    for row in rows:
        line = _keys(row.kind, row.context, row.setting)
        line += [str(row.cases), interval(row.same_tokens, 1), str(row.tokens), str(row.identical)]
        line += [interval(row.acceptance, 2), interval(row.dense_acceptance, 2)]
        lines.append([*line, "-" if row.share is None else f"{100 * row.share:.0f} %"])
    return headings, lines


def terminal(table: Table) -> list[str]:
    """Lines with columns side by side; kind and selector to the left, numbers to the right."""
    headings, rows = table
    widths = [max(map(len, column)) for column in zip(headings, *rows)]
    left = {headings.index(name) for name in ("kind", "selector")}

    def pad(column: int, cell: str) -> str:
        return cell.ljust(widths[column]) if column in left else cell.rjust(widths[column])

    return ["  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in (headings, *rows)]


def markdown(table: Table) -> list[str]:
    headings, rows = table
    rule = ["---" if name in ("kind", "selector") else "---:" for name in headings]
    return [f"| {' | '.join(row)} |" for row in (headings, rule, *rows)]
