"""Milliseconds of a dense verify step against its floor, and of a plain step beside it.

    python scripts/bench_verify.py                      # smollm2-135m: 512 .. 8k tokens, batch 1 and 4
    python scripts/bench_verify.py --against HEAD~3     # the same at another commit, interleaved

A step is what the loop runs: propose, verify, accept, commit, inside one jitted slice. Its drafts are
always wrong, so that every step emits one token and lengths hardly move. Cache contents are random: time
does not depend on them. Floor: max(bytes / bandwidth, FLOPs / rate), where bytes are the weights and the
committed K/V, read once, and bandwidth (one vector times a large matrix) and rate (a square product) are
measured in this run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 4096, 8000])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument(
        "--max-model-lens",
        nargs="+",
        type=int,
        default=[1024, 8192],
        help="context limits to compare at --compare-length",
    )
    parser.add_argument("--compare-length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps in one timed slice")
    parser.add_argument("--against", metavar="REV", help="interleave with the same script at a commit")
    return parser.parse_args()


def measure_machine() -> dict[str, float]:
    """Read bandwidth (GB/s) and float32 matrix rate (GFLOP/s) that XLA reaches here."""
    import jax
    import jax.numpy as jnp

    def best(function: Any, *arguments: Any) -> float:
        jax.block_until_ready(function(*arguments))
        times = []
        for _ in range(7):
            started = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times.append(time.perf_counter() - started)
        return min(times)

    matrix = jnp.ones((16384, 8192), jnp.float32)
    vector = jnp.ones((8192,), jnp.float32)
    square = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda a, b: jax.lax.dot(a, b, precision="highest"))
    return {
        "bandwidth_gb_per_second": matrix.nbytes / best(product, matrix, vector) / 1e9,
        "rate_gflop_per_second": 2 * 2048**3 / best(product, square, square) / 1e9,
    }


def make_wrong_drafter(num_speculative_tokens: int) -> Any:
    """A drafter whose tokens the target never picks (its least likely ones are as good as any)."""
    import jax.numpy as jnp

    from sv_jax.speculation import Draft, SpeculationState

    @dataclasses.dataclass(frozen=True)
    class WrongDrafter:
        num_speculative_tokens: int

        def propose(self, state: SpeculationState) -> Draft:
            nodes = jnp.arange(self.num_speculative_tokens + 1, dtype=jnp.int32)
            root = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)
            parents = jnp.broadcast_to(nodes - 1, (root.shape[0], len(nodes)))
            tokens = jnp.where(nodes == 0, root, 3)
            return Draft(tokens=tokens, parents=parents)

    return WrongDrafter(num_speculative_tokens)


def filled_state(
    model: Any, length: int, batch: int, max_model_len: int, num_nodes: int, sparsity: Any = None
) -> Any:
    """A state with `length` committed positions of random K/V, in the bucket the engine would choose."""
    import jax
    import jax.numpy as jnp

    from sv_jax.engine.buckets import bucket_for, largest_bucket
    from sv_jax.speculation import make_request, start_state

    bucket = bucket_for(length + num_nodes, largest_bucket(max_model_len, num_nodes))
    request = make_request([length] * batch, [length + (1 << 20)] * batch)
    state = start_state(model.target, request, capacity=bucket, sparsity=sparsity)
    keys = iter(jax.random.split(jax.random.key(0), 2 * model.target.config.num_layers))
    cache = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype), state.cache)
    lengths = jnp.full((batch,), length, jnp.int32)
    summaries = state.summaries
    if summaries is not None:
        from sv_jax.sparsity.summaries import update_summaries

        nothing = jnp.zeros_like(lengths)
        summaries = update_summaries(summaries, cache, nothing, lengths, bucket, model.target.sharding)
    return dataclasses.replace(state, cache=cache, summaries=summaries, lengths=lengths)


class Timed:
    """One slice program on one state; `run` times `steps` steps and puts the lengths back."""

    def __init__(self, model: Any, drafter: Any, state: Any, steps: int, sparsity: Any = None) -> None:
        import jax
        import jax.numpy as jnp

        self.model, self.drafter, self.state, self.sparsity = model, drafter, state, sparsity
        self.steps = jnp.int32(steps)
        self.lengths = jax.device_get(state.lengths)
        # Twice: the second call differs from the first in how its arrays are placed, and is traced anew.
        self.run()
        self.run()

    def run(self) -> float:
        """Milliseconds a step."""
        import jax
        import jax.numpy as jnp

        from sv_jax.speculation import decode_slice

        before = int(self.state.steps)
        started = time.perf_counter()
        state = decode_slice(
            self.model.target, self.model.params, self.drafter, self.state, self.steps, None, self.sparsity
        )
        jax.block_until_ready(state.lengths)
        elapsed = time.perf_counter() - started
        done = int(state.steps) - before
        self.state = dataclasses.replace(state, lengths=jnp.array(self.lengths))
        return 1e3 * elapsed / done


def floor_ms(
    model: Any, machine: dict[str, float], length: int, batch: int, num_nodes: int
) -> dict[str, float]:
    import jax

    config = model.target.config
    sizes = jax.tree.leaves(model.params)
    weights = sum(x.nbytes for x in sizes)
    if not config.tie_word_embeddings:
        weights -= model.params["embedding"]["embedding"].nbytes  # a lookup reads T rows of it
    itemsize = sizes[0].dtype.itemsize
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * length * batch * itemsize
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * length * batch * num_nodes
    flops = 2 * weights / itemsize * batch * num_nodes + attention
    by_bytes = (weights + kv) / machine["bandwidth_gb_per_second"] / 1e6
    by_flops = flops / machine["rate_gflop_per_second"] / 1e6
    return {"bytes_ms": by_bytes, "flops_ms": by_flops, "floor_ms": max(by_bytes, by_flops)}


def bench_lengths(
    model: Any, arguments: argparse.Namespace, machine: dict[str, float]
) -> list[dict[str, Any]]:
    from sv_jax.drafts.none import NoDraft

    num_nodes = arguments.num_speculative_tokens + 1
    wrong = make_wrong_drafter(arguments.num_speculative_tokens)
    rows = []
    for batch in arguments.batch_sizes:
        for length in arguments.lengths:
            verify = Timed(
                model,
                wrong,
                filled_state(model, length, batch, model.max_model_len, num_nodes),
                arguments.steps,
            )
            plain = Timed(
                model, NoDraft(), filled_state(model, length, batch, model.max_model_len, 1), arguments.steps
            )
            times = [(verify.run(), plain.run()) for _ in range(arguments.rounds)]
            verify_ms, plain_ms = (statistics.median(column) for column in zip(*times))
            row = {
                "length": length,
                "batch": batch,
                "verify_ms": verify_ms,
                "plain_ms": plain_ms,
                **floor_ms(model, machine, length, batch, num_nodes),
            }
            rows.append(row)
            print(
                f"batch {batch}, {length:5d} tokens: verify T = {num_nodes} {verify_ms:7.1f} ms, "
                f"plain {plain_ms:7.1f} ms, floor {row['floor_ms']:6.1f} ms "
                f"(bytes {row['bytes_ms']:.1f}, FLOPs {row['flops_ms']:.1f})",
                file=sys.stderr,
            )
    return rows


def bench_context_limits(model: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """A step at --compare-length committed tokens must not cost more under a larger limit."""
    wrong = make_wrong_drafter(arguments.num_speculative_tokens)
    num_nodes = arguments.num_speculative_tokens + 1
    timed = {
        limit: Timed(
            model, wrong, filled_state(model, arguments.compare_length, 1, limit, num_nodes), arguments.steps
        )
        for limit in arguments.max_model_lens
    }
    times: dict[int, list[float]] = {limit: [] for limit in timed}
    for _ in range(arguments.rounds):
        for limit, runner in timed.items():
            times[limit].append(runner.run())
    medians = {str(limit): statistics.median(values) for limit, values in times.items()}
    print(f"{arguments.compare_length} tokens under limits: {medians}", file=sys.stderr)
    return medians


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import sv_jax

    machine = measure_machine()
    print(f"machine: {machine}, {os.cpu_count()} cores", file=sys.stderr)
    model = sv_jax.load_model(arguments.model, dtype=arguments.dtype, progress=False)
    return {
        "model": arguments.model,
        "dtype": model.dtype,
        "machine": machine,
        "cores": os.cpu_count(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "steps": bench_lengths(model, arguments, machine),
        "context_limits_ms": bench_context_limits(model, arguments),
    }


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def compare(arguments: argparse.Namespace, rounds: int = 3) -> dict[str, Any]:
    """Runs this script here and in a checkout of --against, in turns; ratios of medians."""
    passed = [word for word in sys.argv[1:] if word != "--against" and word != arguments.against]
    results: dict[str, list[dict[str, Any]]] = {"here": [], "there": []}
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "baseline"
        subprocess.run(
            ["git", "worktree", "add", "--detach", there, arguments.against],
            cwd=ROOT,
            check=True,
            stdout=sys.stderr,
        )
        try:
            for _ in range(rounds):
                for side, root in (("here", ROOT), ("there", there)):
                    done = subprocess.run(
                        [sys.executable, root / "scripts" / "bench_verify.py", *passed],
                        cwd=root,
                        env={**os.environ, "PYTHONPATH": str(root)},
                        check=True,
                        text=True,
                        stdout=subprocess.PIPE,
                    )
                    results[side].append(json.loads(done.stdout.strip().splitlines()[-1]))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", there], cwd=ROOT, check=True)
    rows = []
    for index, row in enumerate(results["here"][0]["steps"]):
        medians = {
            side: statistics.median(run["steps"][index]["verify_ms"] for run in runs)
            for side, runs in results.items()
        }
        rows.append(
            {
                "length": row["length"],
                "batch": row["batch"],
                **medians,
                "ratio": medians["here"] / medians["there"],
            }
        )
    return {"against": arguments.against, "steps": rows}


def main() -> None:
    arguments = parse_arguments()
    print(json.dumps(compare(arguments) if arguments.against else measure(arguments)))


if __name__ == "__main__":
    main()
