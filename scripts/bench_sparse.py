"""Milliseconds of a sparse verify step beside the dense one, in turns, and its bytes floor.

    python scripts/bench_sparse.py                        # smollm2-135m: 8k tokens, batch 1 and 4
    python scripts/bench_sparse.py --lengths 4000 --keep 0.1 --sparsity configs/sparsity/smollm2-135m.toml
    python scripts/bench_sparse.py --lengths 500 --batch-sizes 1 --keep --ffn-keep 0.3 0.5 0.7

Steps and floors are bench_verify.py's; a sparse step's bytes are the weights, the K/V of the blocks that it
reads and the summaries that it scores. Cache contents are random: time does not depend on them. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from typing import Any

from bench_verify import Timed, filled_state, floor_ms, git, make_wrong_drafter, measure_machine
from comparison.sparsity import add_sparsity_arguments, sparsity_from

import sv_jax
from sv_jax.engine.ffn_reads import weight_channels
from sv_jax.sparsity.config import SparsityConfig
from sv_jax.sparsity.ffn_config import ChannelSparsity
from sv_jax.sparsity.plan import SparsityPlan, make_plan
from sv_jax.sparsity.reads import kv_bytes, summary_bytes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--lengths", nargs="+", type=int, default=[8000])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--keep", nargs="*", type=float, default=[0.10, 0.25])
    parser.add_argument("--ffn-keep", nargs="*", type=float, default=[], help="shares of shared channels")
    parser.add_argument("--ffn-threshold", nargs="*", type=float, default=[], help="of the rule gate")
    add_sparsity_arguments(parser)
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="steps in one timed slice")
    return parser.parse_args()


def sparse_floor_ms(
    model: Any, plan: SparsityPlan, machine: dict[str, float], length: int, batch: int, num_nodes: int
) -> float:
    """Bytes floor of a sparse step: floor_ms of an empty cache less the weights that are left out, and what
    attention reads."""
    config, itemsize = model.target.config, 4 if model.dtype == "float32" else 2
    attention = plan.attention
    if attention is None:
        saved = weight_channels(None, config, 1, 0, 1) - weight_channels(plan.channels, config, 1, 0, 1)
        saved_ms = saved * config.hidden_size * itemsize / machine["bandwidth_gb_per_second"] / 1e6
        return floor_ms(model, machine, length, batch, num_nodes)["bytes_ms"] - saved_ms
    l0, rho = attention.most_l0, attention.most_rho
    tokens = min(length, int(max(length - l0, 0) * rho) + l0)
    blocks = -(-tokens // attention.block_size)
    read = (
        blocks * attention.block_size * config.num_layers * config.num_kv_heads * kv_bytes(config, itemsize)
    )
    read += int(summary_bytes(attention, config, length))
    weights_ms = floor_ms(model, machine, 0, batch, num_nodes)["bytes_ms"]
    return weights_ms + batch * read / machine["bandwidth_gb_per_second"] / 1e6


def bench(model: Any, arguments: argparse.Namespace, machine: dict[str, float]) -> list[dict[str, Any]]:
    num_nodes = arguments.num_speculative_tokens + 1
    wrong = make_wrong_drafter(arguments.num_speculative_tokens)
    base = sparsity_from(arguments)
    plans: dict[str, SparsityPlan | None] = {"dense": None}
    for keep in arguments.keep:
        attention = dataclasses.replace(base, keep=keep, rho=None, l0=None)
        plans[f"keep {keep:g}"] = make_plan(SparsityConfig(attention), model.target.config)
    ffn = [ChannelSparsity("shared", keep=keep) for keep in arguments.ffn_keep]
    ffn += [ChannelSparsity("gate", (threshold,)) for threshold in arguments.ffn_threshold]
    for channels in ffn:
        name = (
            f"ffn {channels.keep:g}" if channels.thresholds is None else f"ffn >= {channels.thresholds[0]:g}"
        )
        plans[name] = make_plan(SparsityConfig(None, channels), model.target.config)
    rows = []
    for batch in arguments.batch_sizes:
        for length in arguments.lengths:
            timed = {}
            for name, plan in plans.items():
                state = filled_state(model, length, batch, model.max_model_len, num_nodes, plan)
                timed[name] = Timed(model, wrong, state, arguments.steps, plan)
            times: dict[str, list[float]] = {name: [] for name in timed}
            for _ in range(arguments.rounds):
                for name, runner in timed.items():
                    times[name].append(runner.run())
            dense_ms = statistics.median(times["dense"])
            for name, plan in plans.items():
                median = statistics.median(times[name])
                floor = (
                    floor_ms(model, machine, length, batch, num_nodes)["bytes_ms"]
                    if plan is None
                    else sparse_floor_ms(model, plan, machine, length, batch, num_nodes)
                )
                row = {
                    "length": length,
                    "batch": batch,
                    "verification": name,
                    "ms": median,
                    "fastest_ms": min(times[name]),
                    "slowest_ms": max(times[name]),
                    "of_dense": median / dense_ms,
                    "bytes_floor_ms": floor,
                }
                rows.append(row)
                print(
                    f"batch {batch}, {length} tokens, {name:>10}: {median:7.1f} ms "
                    f"({row['fastest_ms']:.1f} to {row['slowest_ms']:.1f}), {row['of_dense']:.2f} of dense, "
                    f"bytes floor {floor:.1f} ms",
                    file=sys.stderr,
                )
    return rows


def main() -> None:
    arguments = parse_arguments()
    machine = measure_machine()
    print(f"machine: {machine}, {os.cpu_count()} cores", file=sys.stderr)
    model = sv_jax.load_model(arguments.model, dtype=arguments.dtype, progress=False)
    result = {
        "model": arguments.model,
        "sparsity": dataclasses.asdict(sparsity_from(arguments)),
        "dtype": model.dtype,
        "machine": machine,
        "cores": os.cpu_count(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "steps": bench(model, arguments, machine),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
