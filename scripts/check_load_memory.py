r"""How much host memory does loading take beside the weights themselves?

    python scripts/check_load_memory.py                        # qwen2.5-coder-0.5b, both dtypes, 1x1 and 2x1
    python scripts/check_load_memory.py --model smollm2-135m --dtypes float32 --meshes 1x1 4x2

Every combination is loaded in a process of its own, whose resident memory is sampled while it loads.
Emulated devices live in host memory, so that the sum over devices is subtracted there; what remains must
stay under 10 % of that sum plus 1 GiB. Pages of the checkpoint that are mapped while they are read count
too. The last line is one JSON object; the exit code is 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from typing import Any

import psutil

GIB = 1 << 30
SAMPLE_SECONDS = 0.005  # a block of 128 MiB takes several times as long to read


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--meshes", nargs="+", default=["1x1", "2x1"])
    parser.add_argument("--child", nargs=2, metavar=("MESH", "DTYPE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def load_when_told(model: str, mesh: str, dtype: str) -> None:
    """The child: it gets everything ready, waits for a line, loads, and says what lies on its devices."""
    import jax

    import sv_jax
    from sv_jax.sharding import parse_mesh

    loaded = sv_jax.load_model(model, mesh=parse_mesh(mesh), dtype=dtype, lazy=True, progress=False)
    jax.block_until_ready([jax.device_put(0, device) for device in jax.devices()])  # their own needs
    print("ready", flush=True)
    sys.stdin.readline()
    leaves = jax.tree.leaves(loaded.params)
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    platform = leaves[0].devices().pop().platform
    print(json.dumps({"device_bytes": held, "platform": platform}), flush=True)


def sample_until_it_speaks(child: subprocess.Popen[str]) -> tuple[int, str]:
    """The child's largest resident memory up to its next line, and that line."""
    lines: list[str] = []
    assert child.stdout is not None
    output = child.stdout
    reader = threading.Thread(target=lambda: lines.append(output.readline()))
    reader.start()
    process, peak = psutil.Process(child.pid), 0
    while reader.is_alive():
        peak = max(peak, process.memory_info().rss)
        time.sleep(SAMPLE_SECONDS)
    return peak, lines[0]


def measure(model: str, mesh: str, dtype: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", model, "--child", mesh, dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise SystemExit(f"loading {model} failed")
        before = psutil.Process(child.pid).memory_info().rss
        child.stdin.write("load\n")
        child.stdin.flush()
        peak, line = sample_until_it_speaks(child)
    if not line:
        raise SystemExit(f"loading {model} failed")
    answer = json.loads(line)
    in_host = answer["device_bytes"] if answer["platform"] == "cpu" else 0
    extra, bound = peak - before - in_host, answer["device_bytes"] // 10 + GIB
    return {
        "mesh": mesh,
        "dtype": dtype,
        "platform": answer["platform"],
        "device_gib": round(answer["device_bytes"] / GIB, 3),
        "before_gib": round(before / GIB, 3),
        "peak_gib": round(peak / GIB, 3),
        "extra_gib": round(extra / GIB, 3),
        "bound_gib": round(bound / GIB, 3),
        "within_bound": extra <= bound,
    }


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        load_when_told(arguments.model, *arguments.child)
        return 0
    runs = []
    for dtype in arguments.dtypes:
        for mesh in arguments.meshes:
            runs.append(measure(arguments.model, mesh, dtype))
            print(runs[-1], file=sys.stderr, flush=True)
    passed = all(run["within_bound"] for run in runs)
    print(json.dumps({"passed": passed, "model": arguments.model, "runs": runs}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
