"""What the comparison ran on, and how quiet it was there."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("jax", "jaxlib", "torch", "transformers", "llama-cpp-python", "numpy")


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The model name, with what tells processors of one name apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name", platform.machine())
    return f"{name} (family {found.get('cpu family', '?')}, model {found.get('model', '?')})"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """Variables that change how threads wait and what is compiled; best none at all."""
    prefixes = ("OMP_", "GOMP_", "KMP_", "MKL_", "GGML_", "XLA_", "JAX_")
    return {key: value for key, value in sorted(os.environ.items()) if key.startswith(prefixes)}


def commit() -> str:
    """The short hash, with a + where tracked files differ from it."""
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


@dataclasses.dataclass(frozen=True)
class Load:
    """Seconds of processor time until now, of all processes and of this one.

    Threads that meet at barriers (torch, llama.cpp) lose much more to a busy neighbour than ours do, so that
    a comparison on a busy machine is worth nothing.
    """

    clock: float
    everybody: float | None  # None: this system does not tell
    own: float

    @staticmethod
    def now() -> Load:
        own = os.times()
        return Load(time.perf_counter(), _busy_seconds(), own.user + own.system)

    def others_since(self, before: Load) -> float | None:
        """Cores that others kept busy on average; a hypervisor's steal counts as others."""
        if self.everybody is None or before.everybody is None:
            return None
        busy = (self.everybody - before.everybody) - (self.own - before.own)
        return max(0.0, busy / (self.clock - before.clock))


def _busy_seconds() -> float | None:
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _wait, interrupts, soft, steal = map(int, fields)
        return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
