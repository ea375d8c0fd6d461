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
import heapq
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

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


def compile_kernel(arguments: dict) -> None:
    """Compiles one shape for `topology`, in a process whose LIBTPU_INIT_ARGS ask for dumps."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from pallas_kernels.block_sparse_attention import tpu

    topology = topologies.get_topology_desc(platform="tpu", topology_name=arguments["topology"])
    device = SingleDeviceSharding(topology.devices[0])
    kv_heads, head_dim, positions, block = 2, arguments["head_dim"], 8192, arguments["block_size"]
    cache = (1, kv_heads, positions, head_dim)
    shapes = [
        ((1, arguments["tokens"], kv_heads * arguments["group"], head_dim), jnp.bfloat16),
        (cache, jnp.bfloat16),
        (cache, jnp.bfloat16),
        ((1, kv_heads, positions // block), jnp.int32),
        ((1, kv_heads), jnp.int32),
        ((1,), jnp.int32),
    ]

    def kernel(*arrays):
        return tpu.block_sparse_attention(
            *arrays, block_size=block, window=None, positions=None, scale=head_dim**-0.5
        )

    traced = jax.jit(kernel).trace(*(jax.ShapeDtypeStruct(*x, sharding=device) for x in shapes))
    traced.lower(lowering_platforms=("tpu",)).compile()


def measure(
    *, tokens: int, block_size: int, group: int = 4, head_dim: int = 128, topology: str = "v5e:2x2"
) -> dict:
    """Compiles one shape in a process of its own and reads the dump: counts, and bundles per position."""
    from pallas_kernels.block_sparse_attention.tpu import chunk_positions

    arguments = {
        "tokens": tokens,
        "block_size": block_size,
        "group": group,
        "head_dim": head_dim,
        "topology": topology,
    }
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = {**os.environ, "LIBTPU_INIT_ARGS": flags}
        command = [sys.executable, "-m", "scripts.tpu_bundles", "--compile", json.dumps(arguments)]
        subprocess.run(command, env=environment, check=True, cwd=Path(__file__).parents[1])
        [dump] = Path(folder).glob("*-block_sparse_attention*-final_bundles.txt")
        counts = hot_loop(dump.read_text())
    return {**arguments, **counts, "per_position": counts["bundles"] / chunk_positions(block_size)}


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
        return compile_kernel(json.loads(arguments.compile))
    results = []
    for tokens in arguments.tokens:
        for block_size in arguments.block_sizes:
            result = measure(
                tokens=tokens,
                block_size=block_size,
                group=arguments.group,
                head_dim=arguments.head_dim,
                topology=arguments.topology,
            )
            kinds = ", ".join(f"{kind} {result[kind]}" for kind in COUNTED)
            print(
                f"T {tokens:3} block {block_size:4}: {result['per_position']:.2f} bundles a position "
                f"(HBM {FLOOR}), {result['bundles']} a round, {result['straight']} of them straight: {kinds}",
                flush=True,
            )
            results.append(result)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
