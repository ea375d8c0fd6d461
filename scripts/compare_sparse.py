"""Generation with prompt lookup at long contexts: dense and sparse verification, in turns.

    python scripts/compare_sparse.py                                  # quoting and code at 6,000 tokens
    python scripts/compare_sparse.py --contexts 7500 --rounds 5 --sparsity configs/sparsity/smollm2-135m.toml
    python scripts/compare_sparse.py --model smollm2-135m-moe --files attention.toml experts.toml both.toml

Every round decodes each prompt once with each setting: dense, and --keep 0.25 and the paper's piecewise
budget with --l0 1024 --rho 0.1, or the files. Sparse verification is lossy: the table has where its text
first differs from the dense one. Medians and (min..max) over rounds; prefill, which is dense, is not in
tokens/s. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from comparison.machine import Load, available_cores, commit, cpu_name, versions
from comparison.prompts import TASKS, Cell, make_cells
from comparison.results import first_difference
from comparison.sparsity import add_sparsity_arguments, sparsity_from

import sv_jax
from sv_jax.sparsity.config import SparsityConfig, read_sparsity


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tasks", nargs="+", default=["quoting", "code"], choices=TASKS)
    parser.add_argument("--contexts", nargs="+", type=int, default=[6000], help="tokens of the prompts")
    parser.add_argument("--new-tokens", type=int, default=128, help="exactly; no text ends before")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--files", nargs="+", metavar="F.toml", help="sparsity files in place of budgets")
    add_sparsity_arguments(parser)
    return parser.parse_args()


def settings(arguments: argparse.Namespace) -> dict[str, SparsityConfig | None]:
    if arguments.files:
        return {"dense": None, **{Path(name).stem: read_sparsity(name) for name in arguments.files}}
    base = dataclasses.replace(sparsity_from(arguments), keep=None, l0=None, rho=None)
    return {
        "dense": None,
        "keep 0.25": SparsityConfig(dataclasses.replace(base, keep=0.25)),
        "l0 1024, rho 0.1": SparsityConfig(dataclasses.replace(base, l0=1024, rho=0.1)),
    }


def run_cell(model: Any, cell: Cell, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per setting."""
    configs = settings(arguments)
    results: dict[str, list[Any]] = {name: [] for name in configs}
    for number in range(arguments.rounds + 1):  # the first compiles, and is not counted
        names = list(configs)
        start = number % len(names)
        for name in names[start:] + names[:start]:
            result = model.generate(
                [list(cell.token_ids)],
                max_new_tokens=arguments.new_tokens,
                num_speculative_tokens=arguments.num_speculative_tokens,
                ignore_eos=True,
                sparsity=configs[name],
            )
            if number:
                results[name].append(result)
                pace = result.stats.tokens_per_second
                print(
                    f"{cell.name}: round {number}: {name}: {pace:.1f} tokens/s", file=sys.stderr, flush=True
                )
    dense_ids = results["dense"][0].outputs[0].token_ids
    rows = []
    for name, runs in results.items():
        pace = [run.stats.tokens_per_second for run in runs]
        over_dense = [a / run.stats.tokens_per_second for a, run in zip(pace, results["dense"])]
        ids = runs[0].outputs[0].token_ids
        rows.append(
            {
                "cell": cell.name,
                "prompt_tokens": len(cell.token_ids),
                "verification": name,
                "tokens_per_second": statistics.median(pace),
                "range": [min(pace), max(pace)],
                "of_dense": statistics.median(pace)
                / statistics.median(run.stats.tokens_per_second for run in results["dense"]),
                "of_dense_range": [min(over_dense), max(over_dense)],
                "mean_acceptance_length": runs[0].stats.mean_acceptance_length,
                "same_as_dense": ids == dense_ids,
                "first_difference": first_difference(dense_ids, ids),
                "reads": {part: runs[0].stats.as_dict()[part] for part in ("sparse_attention", "sparse_ffn")},
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| text | verification | tokens/s | of dense | tokens a step | first token that differs |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["range"]
        differs = row["first_difference"]
        pace = f"{row['tokens_per_second']:.1f} ({low:.1f}..{high:.1f})"
        lines.append(
            f"| {row['cell']} | {row['verification']} | {pace} | {row['of_dense']:.2f} "
            f"| {row['mean_acceptance_length']:.2f} | {'none' if differs is None else differs + 1} |"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    model = sv_jax.load_model(arguments.model, dtype=arguments.dtype, progress=False)
    cells = make_cells(model, arguments.tasks, arguments.contexts, arguments.new_tokens)
    before = Load.now()
    rows = [row for cell in cells for row in run_cell(model, cell, arguments)]
    print("\n" + table(rows), file=sys.stderr)
    machine = {"cpu": cpu_name(), "threads": available_cores(), "cores": os.cpu_count()}
    result = {
        "model": model.provenance,
        "commit": commit(),
        "machine": {**machine, "cores_busy_with_others": Load.now().others_since(before)},
        "versions": versions(),
        "settings": vars(arguments),
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
