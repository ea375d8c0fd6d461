"""Whole slices of the decoding loop through the compilers of hardware that is not here, in a table.

    python scripts/aot_report.py                                      # both models on all platforms
    python scripts/aot_report.py --platforms tpu:v5e --models llama-3.1-8b --verify sparse

A slice is propose, verify, accept and commit in one while loop: 64 tokens a row, 4 rows, 32,768 slots, on 8
chips as 4x2 (data x model); Qwen3's experts are cut over all chips. It says what the compiler says: seconds,
bytes per chip, collectives, copies of a layer's K or V; and what a step must read by the shapes. Nothing
runs, so nothing here is a speed. Needs `pip install -e '.[aot]'`. Results are kept in --output as they come.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
from comparison.machine import available_cores, commit, cpu_name

from sv_jax.ahead_of_time.programs import SliceProgram, compile_slice
from sv_jax.ahead_of_time.targets import CompilerMissing
from sv_jax.checkpoints.config_alone import find_config
from sv_jax.config import Cuts
from sv_jax.evaluation.store import Store
from sv_jax.planning.deployment import Deployment
from sv_jax.planning.floors import make_step
from sv_jax.planning.hardware import GIB
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig
from sv_jax.sparsity.plan import make_plan

MODELS = {"llama-3.1-8b": Cuts(), "qwen3-30b-a3b": Cuts(expert_shard="all")}
PLATFORMS = {"tpu:v5e": ("xla", "pallas_tpu"), "tpu:v6e": ("xla", "pallas_tpu"), "gpu:h200": ("xla",)}
SPARSITY = SparsityConfig(AttentionSparsity(keep=0.1, block_size=128, score="mass"))
MESH, BATCH, CAPACITY, DRAFTED = (4, 2), 4, 32768, 63


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--platforms", nargs="+", default=list(PLATFORMS), choices=list(PLATFORMS))
    parser.add_argument("--implementations", nargs="+", default=["xla", "pallas_tpu"])
    parser.add_argument("--verify", nargs="+", default=["dense", "sparse"], choices=["dense", "sparse"])
    parser.add_argument("--output", default="aot-report", help="directory of the results")
    return parser.parse_args()


def programs(arguments: argparse.Namespace) -> list[tuple[str, SliceProgram]]:
    found = []
    for name, platform in itertools.product(arguments.models, arguments.platforms):
        config, _ = find_config(name)
        for implementation, verify in itertools.product(PLATFORMS[platform], arguments.verify):
            if implementation in arguments.implementations:
                sparsity = SPARSITY if verify == "sparse" else None
                cut = {"sparsity": sparsity, "implementation": implementation, "cuts": MODELS[name]}
                program = SliceProgram(config, platform, MESH, BATCH, CAPACITY, DRAFTED, **cut)
                found.append((name, program))
    return found


def step_reads(name: str, program: SliceProgram) -> dict[str, float]:
    """Bytes per chip that a step must read, by part (see sv_jax.planning.floors)."""
    plan = None if program.sparsity is None else make_plan(program.sparsity, program.config)
    deployment = Deployment(
        name=name,
        config=program.config,
        platform=program.platform,
        mesh=program.mesh,
        dtype=program.dtype,
        max_model_len=program.capacity - program.num_speculative_tokens - 1,
        batch_size=program.batch,
        num_speculative_tokens=program.num_speculative_tokens,
        sparsity=plan,
        cuts=program.cuts,
    )
    width = program.num_speculative_tokens + 1
    step = make_step(deployment, "dense" if plan is None else "sparse", width, plan)
    return {part.name: part.bytes for part in step.parts}


def report(name: str, program: SliceProgram) -> dict[str, Any]:
    compiled = compile_slice(program, arrays=True)
    jax.clear_caches()  # traces of whole models, gigabytes after some
    result = dataclasses.asdict(compiled) | {"reads": step_reads(name, program)}
    result["cache_copies"] = len(compiled.cache_copies)
    return result


def identity(name: str, program: SliceProgram) -> dict[str, Any]:
    versions = {"jax": jax.__version__}
    for package in ("libtpu", "jax-cuda12-plugin"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    fields = dataclasses.asdict(program)
    return {"program": fields | {"config": name}, "versions": versions, "commit": commit()}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | platform | attention | verify | compile s | arguments | temporaries | of them arrays "
        "| cache copies | collectives in the loop | a step reads |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        moved = ", ".join(f"{count} {kind}" for kind, count in sorted(row["collectives"].items()))
        temporaries = [row["temporary_bytes"], row["temporary_array_bytes"]]
        lines.append(
            f"| {row['model']} | {row['topology']} | {row['implementation']} | {row['verify']} "
            f"| {row['seconds']:.0f} | {row['argument_bytes'] / GIB:.2f} GiB "
            f"| {' | '.join(f'{size / 2**20:.0f} MiB' for size in temporaries)} "
            f"| {row['cache_copies']} | {moved} | {sum(row['reads'].values()) / GIB:.2f} GiB |"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    # Compilers need no devices; a TPU or GPU that is here has no part in this.
    jax.config.update("jax_platforms", "cpu")
    store = Store(Path(arguments.output) / "results.jsonl")
    rows = []
    for name, program in programs(arguments):
        verify = "dense" if program.sparsity is None else "sparse"
        key = identity(name, program)
        if (result := store.get(key)) is None:
            print(f"{name} on {program.platform}, {program.implementation}, {verify}", file=sys.stderr)
            try:
                result = report(name, program)
            except CompilerMissing as missing:
                print(f"skipped: {missing}", file=sys.stderr)
                continue
            store.add([(key, result)])
        about = {"model": name, "implementation": program.implementation, "verify": verify}
        rows.append(about | {"platform": program.platform} | result)
    print(table(rows), file=sys.stderr)
    machine = {"cpu": cpu_name(), "threads": available_cores(), "cores": os.cpu_count()}
    print(json.dumps({"commit": commit(), "machine": machine, "rows": rows}))


if __name__ == "__main__":
    main()
