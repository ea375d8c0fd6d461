"""Medians, spreads and ratios of what was measured, as a dictionary and as Markdown tables."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from comparison.contenders import Contender, Run
from comparison.prompts import Cell

Runs = dict[str, list[Run]]  # of one cell: a contender's name -> its runs, in the order of the rounds
METRICS = ("tokens_per_second", "ttft_seconds", "total_seconds", "acceptance")
TITLES = {
    "tokens_per_second": "Tokens/s after the pass over the prompt (which may emit several where it verifies)",
    "ttft_seconds": "Seconds to the first token",
    "total_seconds": "Seconds of the whole request",
    "acceptance": "Tokens per pass after the one over the prompt (mean acceptance length)",
}
PLAIN, LOOKUP, OURS_PLAIN, AUTO = "transformers", "transformers prompt lookup", "ours plain", "ours auto"


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Of medians, with the spread of the ratios within each round: what disturbed one disturbed both."""
    paired = [a / b for a, b in zip(above, below)]
    return {
        "of_medians": statistics.median(above) / statistics.median(below),
        "paired_median": statistics.median(paired),
        "paired_min": min(paired),
        "paired_max": max(paired),
    }


def ratio_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """(above, below): what the comparison is about, as far as both took part."""
    speculative = [name for name in names if name.startswith("ours") and name != OURS_PLAIN]
    pairs = [(OURS_PLAIN, PLAIN)]
    pairs += [(name, below) for below in (LOOKUP, OURS_PLAIN) for name in speculative]
    return [pair for pair in pairs if set(pair) <= set(names)]


def first_difference(reference: list[int], other: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(reference, other)) if a != b), None)


def same_tokens(
    cell: Cell, runs: Runs, contenders: Sequence[Contender], top2_gap: Callable[[list[int]], float]
) -> dict[str, Any]:
    """True for a contender whose every run has the tokens of transformers' first; else the first difference.

    top2_gap of the logits there: where it is tiny, a sum in another order decides.
    """
    reference = runs[PLAIN][0].token_ids
    found: dict[str, Any] = {}
    for contender in contenders:
        if not contender.same_weights:
            continue
        others = [run.token_ids for run in runs[contender.name] if run.token_ids != reference]
        found[contender.name] = True
        if others:
            at = first_difference(reference, others[0]) or 0
            found[contender.name] = {
                "index": at,
                PLAIN: reference[at],
                "here": others[0][at],
                "top2_gap": top2_gap(cell.token_ids + reference[:at]),
                "runs": len(others),
            }
    return found


def summarise_cell(
    cell: Cell, runs: Runs, contenders: Sequence[Contender], top2_gap: Callable[[list[int]], float]
) -> dict[str, Any]:
    columns = {
        name: {metric: [getattr(run, metric) for run in of_name] for metric in METRICS}
        for name, of_name in runs.items()
    }
    figures: dict[str, dict[str, Any]] = {}
    for name, of_name in runs.items():
        figures[name] = {metric: spread(values) for metric, values in columns[name].items()}
        figures[name]["tokens_with_prompt_pass"] = of_name[0].first_tokens
        ids = " ".join(map(str, of_name[0].token_ids))
        figures[name]["token_ids_sha256"] = hashlib.sha256(ids.encode()).hexdigest()
    return {
        "task": cell.task,
        "context": cell.context,
        "prompt_tokens": len(cell.token_ids),
        "prompt_sha256": cell.sha256,
        "contenders": figures,
        "ratios": {
            f"{above} / {below}": ratio(
                columns[above]["tokens_per_second"], columns[below]["tokens_per_second"]
            )
            for above, below in ratio_pairs(list(runs))
        },
        "same_tokens": same_tokens(cell, runs, contenders, top2_gap),
    }


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _spread_text(figure: dict[str, Any]) -> str:
    return f"{_number(figure['median'])} ({_number(figure['min'])}..{_number(figure['max'])})"


def _ratio_text(figure: dict[str, float]) -> str:
    return f"{figure['of_medians']:.2f} ({figure['paired_min']:.2f}..{figure['paired_max']:.2f})"


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown that lines up in a terminal as well."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [[text.ljust(width) for text, width in zip(row, widths)] for row in [header, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _description(result: dict[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    return (
        f"{result['model']}, {settings['dtype']}, {settings['new_tokens']} new tokens, {machine['threads']} "
        f"threads on {machine['cpu']}, commit `{result['commit']}`. Medians of {result['rounds']} rounds "
        "(min..max); of a ratio, (min..max) of those within a round."
    )


def markdown(result: dict[str, Any]) -> str:
    """All tables: one for each metric, contenders as columns, and the ratios of tokens/s."""
    cells = result["cells"]
    names, pairs = list(cells[0]["contenders"]), list(cells[0]["ratios"])
    parts = [_description(result), "", *(f"* {note}" for note in result["notes"])]
    labels = [[cell["task"], f"{cell['prompt_tokens']:,}"] for cell in cells]
    for metric in METRICS:
        rows = []
        for label, cell in zip(labels, cells):
            figures = [cell["contenders"][name][metric] for name in names]
            text = [_number(f["median"]) if metric == "acceptance" else _spread_text(f) for f in figures]
            rows.append(label + text)
        parts.append(f"\n{TITLES[metric]}:\n\n{_table(['task', 'context', *names], rows)}")
    if pairs:
        rows = [
            label + [_ratio_text(cell["ratios"][pair]) for pair in pairs]
            for label, cell in zip(labels, cells)
        ]
        parts.append(f"\nRatios of tokens/s:\n\n{_table(['task', 'context', *pairs], rows)}")
    parts.append("\n" + _same_tokens_text(cells))
    return "\n".join(parts) + "\n"


def _same_tokens_text(cells: list[dict[str, Any]]) -> str:
    lines = []
    for cell in cells:
        for name, same in cell["same_tokens"].items():
            if same is not True:
                lines.append(
                    f"* {cell['task']}, {cell['prompt_tokens']:,}: {name} differs from transformers at token "
                    f"{same['index']} ({same['here']} for {same[PLAIN]}; gap of the two best logits "
                    f"{same['top2_gap']:.1e}; {same['runs']} runs)"
                )
    return "\n".join(lines) or "All contenders with the same weights wrote the same tokens in every run."
