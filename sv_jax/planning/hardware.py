"""Chips as their vendors publish them. No JAX.

None of these figures was measured here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from sv_jax.config import UserError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator, which JAX takes as one device."""

    platform: str  # JAX's: "tpu" or "gpu"
    memory: int  # bytes that programs can use
    bandwidth: float  # bytes/s of that memory
    matrix_rate: float  # FLOP/s of bfloat16 products, dense
    # Topologies as `jax.experimental.topologies` names them, by their number of chips; (): any number.
    topologies: tuple[str, ...] = ()
    remark: str = ""  # what a person has to know about `memory`


def _chips(topology: str) -> int:
    """ "v5e:4x2" -> 8."""
    return math.prod(int(size) for size in topology.split(":")[1].split("x"))


def _flat(generation: str) -> tuple[str, ...]:
    """Slices of the generations whose chips are on a 2D torus, up to the largest."""
    # libtpu takes 4x2 for v5e and 2x4 for v6e; either way it is the host with 8 chips.
    eight = "4x2" if generation == "v5e" else "2x4"
    shapes = ("1x1", "2x2", eight, "4x4", "4x8", "8x8", "8x16", "16x16")
    return tuple(f"{generation}:{shape}" for shape in shapes)


_CUBES = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_GPU_REMARK = (
    "JAX takes three quarters of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
)

PLATFORMS: Mapping[str, Chip] = {
    # cloud.google.com/tpu/docs/v5e: 16 GB HBM2, 819 GB/s, 197 TFLOP/s (bf16). XLA's TPU compiler allows
    # programs 15.75 GiB of the 16 ("Used .. of 15.75G hbm" when they do not fit).
    "tpu:v5e": Chip("tpu", int(15.75 * GIB), 819e9, 197e12, _flat("v5e")),
    # cloud.google.com/tpu/docs/v6e: 32 GB, 1638 GB/s, 918 TFLOP/s. The compiler allows 31.25 GiB.
    "tpu:v6e": Chip("tpu", int(31.25 * GIB), 1638e9, 918e12, _flat("v6e")),
    # cloud.google.com/tpu/docs/v5p: 95 GB HBM2e, 2765 GB/s, 459 TFLOP/s. The compiler allows 95.74 GiB.
    "tpu:v5p": Chip("tpu", int(95.74 * GIB), 2765e9, 459e12, tuple(f"v5p:{cube}" for cube in _CUBES)),
    # nvidia.com/en-us/data-center/h100 (SXM): 80 GB, 3.35 TB/s, 1,979 TFLOP/s with 2:4 sparsity, half of it
    # without. GB are taken as 10^9 bytes, the smaller reading; drivers report a little more.
    "gpu:h100": Chip("gpu", 80 * 10**9, 3.35e12, 989e12, remark=_GPU_REMARK),
    # nvidia.com/en-us/data-center/h200 (SXM): 141 GB, 4.8 TB/s, the rate of the H100.
    "gpu:h200": Chip("gpu", 141 * 10**9, 4.8e12, 989e12, remark=_GPU_REMARK),
}


def smallest_topology(name: str, chips: int) -> tuple[str, int] | None:
    """The smallest topology of platform `name` with at least `chips` chips, and its chips; None for GPUs.

    Raises UserError where there is none.
    """
    topologies = PLATFORMS[name].topologies
    if not topologies:
        return None
    for topology in topologies:
        if _chips(topology) >= chips:
            return topology, _chips(topology)
    raise UserError(
        f"a mesh of {chips} chips is larger than any {name} topology; allowed: up to {_chips(topologies[-1])}"
    )
