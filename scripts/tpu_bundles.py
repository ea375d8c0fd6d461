"""Static cost of the block-sparse attention kernel on TPU: VLIW bundles per KV position of its hot loop.

    python -m scripts.tpu_bundles --block-sizes 64,128 --tokens 16,64

Compiles ahead of time (libtpu, no TPU needed) with the compiler's dumps switched on, finds the
straight-line code with the most matrix products and counts the shortest way round the loop that holds it
and starts the copies of a full chunk.
A bundle is one cycle when nothing stalls, so this is a lower bound of the core's time, to hold against the
cycles in which HBM delivers a position (0.94 on v5e: 512 bytes of K and V in bfloat16, 819 GB/s, 1.5 GHz).
Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import collections
import functools
import heapq
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from pallas_kernels.block_sparse_attention.tpu import chunk_positions

AHEAD_OF_TIME = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What libtpu must find in the environment to compile where no TPU is."""

FLOOR = 0.94  # cycles a position on v5e: 512 bytes * 1.5 GHz / 819 GB/s
DELAY_SLOTS = 4  # bundles behind a branch that run whether or not it is taken
BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:\w\w)?\s*:[ >]*\{(.*)$")
BRANCH = re.compile(r"sbr\.rel (?:\((!?%\w+)\) )?target = \$region(\d+)")
COUNTED = {
    "matmul": r"vmatmul|vdwg",
    "latch": r"vmatpush|vlatch",
    "result": r"vmatres|vpop\.f32\.mrf|vpop\.f32\.mrb",
    "exp": r"vpow2\.",
    "lane reduction": r"\.xlane\.",
    "load": r"= vld ",
    "store": r"vst ",
    "spill": r"_spill\].*vst|vst.*_spill",
    "fill": r"vld .*_spill",
    "dma": r"= dma\.|dma\.hbm_to_vmem",
}


@dataclass(frozen=True)
class Shape:
    tokens: int
    block_size: int
    group: int = 4
    head_dim: int = 128


def parse(text: str) -> tuple[list[str], dict[int, int], dict[int, int]]:
    """A dump of final bundles -> bundles, region -> index of its first bundle, index of branch -> region."""
    bundles: list[str] = []
    starts: dict[int, int] = {}
    branches: dict[int, int] = {}
    for line in text.splitlines():
        match = BUNDLE.match(line)
        if not match:
            continue
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", line):
            starts[int(region)] = len(bundles)
        branch = BRANCH.search(line)
        if branch:
            branches[len(bundles)] = int(branch.group(2))
        bundles.append(match.group(2))
    return bundles, starts, branches


def hot_loop(text: str) -> dict[str, int]:
    """Bundles of the shortest cycle through the straight-line code with the most matrix products and that
    with the most copies: a round that multiplies one full chunk without masks and starts another.

    Returns:
      "bundles" of the cycle, "straight" of the products' straight-line code, and how often the latter holds
      each kind of instruction in COUNTED.

    Raises:
      ValueError: no product or no copy, or no loop around both.
    """
    bundles, starts, branches = parse(text)
    ends = {index + DELAY_SLOTS + 1 for index in branches}
    borders = sorted({0, len(bundles)} | ends | {starts[region] for region in branches.values()})
    blocks = list(itertools.pairwise(borders))
    first = {begin: i for i, (begin, _) in enumerate(blocks)}
    edges: dict[int, list[int]] = {i: [i + 1] for i in range(len(blocks) - 1)}
    edges[len(blocks) - 1] = []
    for index, region in branches.items():
        source = next(i for i, (begin, end) in enumerate(blocks) if begin <= index < end)
        # A target may lie within the delay slots' successor: blocks begin at every target.
        edges[source].append(first[starts[region]])

    def most(pattern: str) -> list[int]:
        held = [sum(len(re.findall(pattern, bundle)) for bundle in bundles[a:b]) for a, b in blocks]
        if not max(held):
            raise ValueError(f"no {pattern} in the dump")
        return [i for i, number in enumerate(held) if number == max(held)]

    def distance(source: int, target: int) -> float:
        """Bundles from the beginning of one block to that of another; infinite where no way leads."""
        queue, seen = [(blocks[source][1] - blocks[source][0], after) for after in edges[source]], set()
        heapq.heapify(queue)
        while queue:
            cost, block = heapq.heappop(queue)
            if block == target:
                return cost
            if block not in seen:
                seen.add(block)
                size = blocks[block][1] - blocks[block][0]
                for after in edges[block]:
                    heapq.heappush(queue, (cost + size, after))
        return math.inf

    rounds = [
        (distance(hot, start) + distance(start, hot) if start != hot else distance(hot, hot), hot)
        for hot in most("vmatmul")
        for start in most("dma.hbm_to_vmem")
    ]
    cost, hot = min(rounds)
    if math.isinf(cost):
        raise ValueError("no loop around the matrix products and the copies")
    a, b = blocks[hot]
    counts = collections.Counter(
        kind
        for bundle in bundles[a:b]
        for part in bundle.split(";;")
        for kind, pattern in COUNTED.items()
        if re.search(pattern, part)
    )
    return {"bundles": cost, "straight": b - a, **{kind: counts[kind] for kind in COUNTED}}


def compile_kernels(topology: str, shapes: list[Shape]) -> None:
    """Compiles each shape, in a process whose LIBTPU_INIT_ARGS ask for dumps."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from pallas_kernels.block_sparse_attention import tpu

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    kv_heads, positions = 2, 8192
    for shape in shapes:
        cache = (1, kv_heads, positions, shape.head_dim)
        arrays = [
            ((1, shape.tokens, kv_heads * shape.group, shape.head_dim), jnp.bfloat16),
            (cache, jnp.bfloat16),
            (cache, jnp.bfloat16),
            ((1, kv_heads, positions // shape.block_size), jnp.int32),
            ((1, kv_heads), jnp.int32),
            ((1,), jnp.int32),
        ]
        kernel = functools.partial(
            tpu.block_sparse_attention,
            block_size=shape.block_size,
            window=None,
            positions=None,
            scale=shape.head_dim**-0.5,
        )
        sharding = SingleDeviceSharding(device)
        traced = jax.jit(kernel).trace(*(jax.ShapeDtypeStruct(*x, sharding=sharding) for x in arrays))
        traced.lower(lowering_platforms=("tpu",)).compile()


def measure(shapes: list[Shape], topology: str = "v5e:2x2") -> list[dict]:
    """Compiles in another process and reads the dumps: for each shape its counts, and bundles a position."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, "-m", "scripts.tpu_bundles", "--topology", topology]
        command += ["--compile", json.dumps([asdict(shape) for shape in shapes])]
        environment = {**os.environ, **AHEAD_OF_TIME, "LIBTPU_INIT_ARGS": flags}
        subprocess.run(command, env=environment, check=True, cwd=Path(__file__).parents[1])
        # Names begin with a clock: in the order of compilation.
        dumps = sorted(Path(folder).glob("*-block_sparse_attention*-final_bundles.txt"))
        dumps = [path for path in dumps if "schedule-analysis" not in path.name]
        if len(dumps) != len(shapes):
            raise RuntimeError(f"{len(dumps)} dumps of {len(shapes)} kernels")
        results = []
        for shape, dump in zip(shapes, dumps):
            counts = hot_loop(dump.read_text())
            per_position = round(counts["bundles"] / chunk_positions(shape.block_size), 3)
            results.append({**asdict(shape), "topology": topology, "per_position": per_position, **counts})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--block-sizes", type=numbers, default=[16, 32, 64, 128, 256])
    parser.add_argument("--tokens", type=numbers, default=[16, 64])
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        shapes = [Shape(**shape) for shape in json.loads(arguments.compile)]
        return compile_kernels(arguments.topology, shapes)
    shapes = [
        Shape(tokens, block_size, arguments.group, arguments.head_dim)
        for tokens in arguments.tokens
        for block_size in arguments.block_sizes
    ]
    results = measure(shapes, arguments.topology)
    print(f"{'T':>4} {'block':>6} {'a position':>11} {'a round':>8} " + " ".join(COUNTED))
    for result in results:
        kinds = " ".join(f"{result[kind]:>{len(kind)}}" for kind in COUNTED)
        print(
            f"{result['tokens']:>4} {result['block_size']:>6} {result['per_position']:>11.2f} "
            f"{result['bundles']:>8} {kinds}"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
