"""Milliseconds of one mixture's expert products: our loop over tiles beside dense ones, in turns.

    python scripts/bench_moe.py                                          # a verify step of Qwen3-30B-A3B
    python scripts/bench_moe.py --experts 8 --per-token 2 --features 4096 --size 3584   # Mixtral 8x7B, F / 4
    python scripts/bench_moe.py --tokens 512 --contenders tiles capacity           # prefill
    python scripts/bench_moe.py --tokens 512 --experts 32 --contenders tiles capacity ragged

Contenders:
  einsum     every expert computes all tokens, one batched product each, masked by the weights of the sum
  einsum32   the same of weights converted to float32 first, in bfloat16 only
  tiles      ours, `sv_jax.model.experts.run_experts`; every-tile: ours with all tokens sent to all experts
  capacity   rows gathered to [E, C, d], one batched product each; C is the most tokens that an expert has, as
             if it were known beforehand: nothing is dropped, and no smaller C would do
  ragged     `run_experts_ragged`: three `jax.lax.ragged_dot`, on CPU [E, N k, d] in memory

Weights and routing are random; time does not depend on weights. Floor: bytes of the active experts over the
bandwidth measured in the same run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from bench_verify import git, measure_machine
from comparison.machine import Load, cpu_name

from pallas_kernels.cache_attention.reference import matmul_precision
from sv_jax.model.experts import ExpertWeights, Routing, run_experts, run_experts_ragged, sort_pairs

CONTENDERS = ("einsum", "einsum32", "tiles", "every-tile", "capacity", "ragged")
Run = Callable[[jax.Array, Routing, ExpertWeights], jax.Array]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--features", type=int, default=2048, help="d")
    parser.add_argument("--size", type=int, default=768, help="F, channels of an expert")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=["einsum", "einsum32", "tiles"]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def batched(x: jax.Array, w: jax.Array) -> jax.Array:
    """[E, T, in] times [E, in, out] -> float32 [E, T, out]."""
    axes = (((2,), (1,)), ((0,), (0,)))
    precision = matmul_precision(w.dtype)
    return jax.lax.dot_general(x, w, axes, precision=precision, preferred_element_type=jnp.float32)


def network(x: jax.Array, w: ExpertWeights) -> jax.Array:
    """Each expert on rows of its own, [E, T, d] -> float32 [E, T, d]."""
    gated, linear = (batched(x, each).astype(x.dtype) for each in (w.gate, w.up))
    return batched(nn.silu(gated) * linear, w.down)


def run_einsum(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    tokens, experts = jnp.arange(len(x))[:, None], weights.gate.shape[0]
    combine = jnp.zeros((len(x), experts)).at[tokens, routing.experts].add(routing.weights)
    out = network(jnp.broadcast_to(x, (experts, *x.shape)), weights)
    return jnp.einsum("etd,te->td", out, combine, precision="highest")


def run_einsum32(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    wide = ExpertWeights(*(w.astype(jnp.float32) for w in weights))
    return run_einsum(x.astype(jnp.float32), routing, wide)


def run_tiles(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    return run_experts(x, routing, weights)[0]


def run_every_tile(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    """All tokens to all experts: a loop that skips nothing."""
    experts = weights.gate.shape[0]
    tokens = jnp.arange(len(x))[:, None]
    combine = jnp.zeros((len(x), experts)).at[tokens, routing.experts].add(routing.weights)
    everywhere = jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32), combine.shape)
    return run_tiles(x, Routing(everywhere, combine), weights)


def make_capacity_run(capacity: int) -> Run:
    """Dispatch, three products, combine: `capacity` rows an expert, zeros beyond its tokens."""

    def run(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        experts, per_token = weights.gate.shape[0], routing.experts.shape[1]
        pairs = sort_pairs(routing.experts, experts)
        slots = jnp.arange(capacity)
        there = slots < pairs.counts[:, None]  # [E, C]
        taken = jnp.take(pairs.order, pairs.firsts[:, None] + slots, mode="clip")
        rows = jnp.where(there[..., None], x[taken // per_token], 0)
        share = jnp.where(there, routing.weights.reshape(-1)[taken], 0.0)
        out = network(rows, weights) * share[..., None]
        return jnp.zeros(x.shape, jnp.float32).at[taken // per_token].add(out)

    return run


def make_inputs(arguments: argparse.Namespace, dtype: str) -> tuple[jax.Array, Routing, ExpertWeights]:
    tokens, experts = arguments.tokens, arguments.experts
    d, size = arguments.features, arguments.size
    *keys, last = jax.random.split(jax.random.key(arguments.seed), 4)
    shapes = (experts, d, size), (experts, d, size), (experts, size, d)
    # Uniform in +-1 over the root of what is summed: outputs near 1, and quick to make.
    drawn = (jax.random.uniform(k, s, dtype, -1, 1) * s[1] ** -0.5 for k, s in zip(keys, shapes))
    weights = jax.block_until_ready(ExpertWeights(*drawn))
    rng = np.random.default_rng(arguments.seed)
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, : arguments.per_token].astype(np.int32)
    shares = rng.random(chosen.shape, np.float32)
    routing = Routing(jnp.asarray(chosen), jnp.asarray(shares / shares.sum(axis=1, keepdims=True)))
    return jax.random.normal(last, (tokens, d), dtype), routing, weights


def bench(arguments: argparse.Namespace, dtype: str, bandwidth: float) -> dict[str, Any]:
    """Milliseconds by contender, and the floor."""
    inputs = x, routing, weights = make_inputs(arguments, dtype)
    counts = np.bincount(np.asarray(routing.experts).ravel(), minlength=arguments.experts)
    functions: dict[str, Run] = {
        "einsum": run_einsum,
        "einsum32": run_einsum32,
        "tiles": run_tiles,
        "every-tile": run_every_tile,
        "capacity": make_capacity_run(int(counts.max())),
        "ragged": run_experts_ragged,
    }
    names = [n for n in arguments.contenders if n != "einsum32" or dtype != "float32"]
    runs = {name: jax.jit(functions[name]) for name in names}
    expected = np.asarray(runs[names[0]](*inputs))
    for name, run in runs.items():  # compiles, and shows that all compute the same
        error = np.abs(np.asarray(run(*inputs)) - expected).max() / np.abs(expected).max()
        assert error < (1e-4 if dtype == "float32" else 0.03), (name, error)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run(*inputs))
            times[name].append(1e3 * (time.perf_counter() - started))
    active = int((counts > 0).sum())
    size = sum(w.nbytes for w in weights) / arguments.experts
    medians = {name: statistics.median(values) for name, values in times.items()}
    row = {
        "dtype": dtype,
        "tokens": len(x),
        "active_experts": active,
        "active_share": active / arguments.experts,
        "most_tokens_of_an_expert": int(counts.max()),
        "bytes_floor_ms": active * size / bandwidth / 1e6,
        "ms": medians,
        "fastest_ms": {name: min(values) for name, values in times.items()},
        "slowest_ms": {name: max(values) for name, values in times.items()},
    }
    if "tiles" in medians:
        row["tiles_of"] = {n: medians["tiles"] / ms for n, ms in medians.items() if n != "tiles"}
    return row


def describe(row: dict[str, Any], num_experts: int) -> str:
    lines = [
        f"{row['dtype']}, {row['tokens']} tokens: {row['active_experts']} of {num_experts} experts active "
        f"({row['active_share']:.3f}), bytes floor {row['bytes_floor_ms']:.1f} ms"
    ]
    for name, ms in row["ms"].items():
        share = row.get("tiles_of", {}).get(name)
        lines.append(
            f"  {name:>10}: {ms:7.1f} ms ({row['fastest_ms'][name]:.1f} to {row['slowest_ms'][name]:.1f})"
            + (f"; tiles take {share:.3f} of it" if share else "")
        )
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    machine, before = measure_machine(), Load.now()
    print(f"machine: {cpu_name()}, {os.cpu_count()} cores, {machine}", file=sys.stderr)
    rows = []
    for dtype in arguments.dtypes:
        rows.append(bench(arguments, dtype, machine["bandwidth_gb_per_second"]))
        print(describe(rows[-1], arguments.experts), file=sys.stderr, flush=True)
    result = {
        "layer": {k: getattr(arguments, k) for k in ("experts", "per_token", "features", "size")},
        "machine": machine,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "cores_busy_with_others": Load.now().others_since(before),
        "commit": git("rev-parse", "--short", "HEAD"),
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
