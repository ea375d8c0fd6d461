"""Figures of the drift meter: what agreement and KL cost in bytes, a line for each selector."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sv_jax.evaluation.report import DriftRow
from sv_jax.evaluation.statistics import Interval
from sv_jax.evaluation.tables import layers_label

MISSING = "no plots: matplotlib is missing; pip install 'sv_jax[evaluate]', or --no-plots"
DASHES = ("-", "--", ":", "-.")


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def write_plots(rows: Sequence[DriftRow], folder: Path, *, title: str) -> list[Path]:
    """A PNG for each kind and context, drift-KIND-CONTEXT.png in `folder`. Needs `can_plot()`."""
    groups: dict[tuple[str, int], list[DriftRow]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.context), []).append(row)
    paths = []
    for (kind, context), group in groups.items():
        # The user's kinds are free text.
        safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in kind)
        path = folder / f"drift-{safe}-{context}.png"
        _write_plot(group, path, f"{title}\n{kind}, {context} tokens, {group[0].cases} cases")
        paths.append(path)
    return paths


def _write_plot(rows: Sequence[DriftRow], path: Path, title: str) -> None:
    # Not pyplot: it would choose a window system, and keep the figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    left, right = figure.subplots(1, 2)
    left.set_ylabel("agreement on the most likely token")
    right.set_ylabel("KL(dense || sparse), nats a position")
    # The best selectors' KL is a thousandth of the worst's; one that reads everything has none at all.
    right.set_yscale("log" if all(row.kl.value > 0 for row in rows) else "symlog")
    selectors = list(dict.fromkeys(row.setting.selector for row in rows))
    sizes = list(dict.fromkeys(row.setting.attention.block_size for row in rows))
    for selector in selectors:
        for size in sizes:
            some = [
                r for r in rows if (r.setting.selector, r.setting.attention.block_size) == (selector, size)
            ]
            some.sort(key=lambda row: row.kv_bytes)
            label = selector if len(sizes) == 1 else f"{selector}, blocks of {size}"
            style = {
                "color": f"C{selectors.index(selector) % 10}",
                "linestyle": DASHES[sizes.index(size) % len(DASHES)],
                "label": label,
            }
            if some:
                _draw(left, some, [row.agreement for row in some], style)
                _draw(right, some, [row.kl for row in some], style)
    for axes in (left, right):
        axes.set_xlabel(f"kB read a step and row (dense: {rows[0].dense_kv_bytes / 1000:,.0f})")
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    if layers := layers_label(rows[0].setting.attention):
        figure.supxlabel(layers, fontsize="x-small")
    figure.savefig(path, dpi=150)


def _draw(axes: Any, rows: Sequence[DriftRow], values: Sequence[Interval], style: dict[str, Any]) -> None:
    """One line with its intervals; none is drawn where it is not known."""
    x = np.array([row.kv_bytes / 1000 for row in rows])
    y, low, high = (np.array([getattr(v, name) for v in values]) for name in ("value", "low", "high"))
    # An interval of draws need not hold the value itself.
    errors = np.nan_to_num(np.clip([y - low, high - y], 0, None))
    axes.errorbar(x, y, yerr=errors, marker="o", markersize=4, capsize=2, **style)
