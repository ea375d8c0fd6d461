"""Devices to compile for without having them: TPU slices through libtpu, GPUs through XLA's CUDA compiler.

A mesh gets the smallest TPU slice with at least as many chips. Nothing here runs a program.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from sv_jax.config import UserError
from sv_jax.planning.hardware import PLATFORMS, smallest_topology
from sv_jax.sharding import DATA, MODEL

_MOST_GPUS = 8  # of a host, all of them linked

# libtpu looks for a TPU of its own unless told what to be.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# Public specifications: NVIDIA's data sheets, and the CUDA programming guide on compute capability 9.0.
_HOPPER = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {memory}
  shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{name}"
"""
_GPU_TEXTS = {
    "gpu:h100": _HOPPER.format(bandwidth=3352320000000, memory=84942979072, name="NVIDIA H100 80GB HBM3"),
    "gpu:h200": _HOPPER.format(bandwidth=4800000000000, memory=150754820096, name="NVIDIA H200"),
}


class CompilerMissing(Exception):
    """The compiler of a platform is not installed; the message says what to install."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What a mesh is compiled for."""

    name: str  # tpu:v5e, gpu:h200
    topology: str  # as the compiler names it
    devices: tuple[Any, ...]

    def mesh(self, shape: tuple[int, int]) -> Mesh:
        """The first devices as (data, model)."""
        count = shape[0] * shape[1]
        devices = np.array(self.devices[:count]).reshape(shape)
        return Mesh(devices, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def find_target(name: str, chips: int) -> Target:
    """Devices of one of hardware.PLATFORMS, at least `chips` of them.

    Raises:
      UserError: an unknown name, or more chips than it has. CompilerMissing: its compiler is not installed.
    """
    if name not in PLATFORMS:
        raise UserError(f"platform {name!r} is not allowed; allowed: {', '.join(PLATFORMS)}")
    if found := smallest_topology(name, chips):
        topology, _ = found
        return Target(name, topology, tuple(_tpu_devices(topology)))
    if chips > _MOST_GPUS:
        raise UserError(f"{chips} chips of {name}; allowed: up to {_MOST_GPUS}, one host")
    return Target(name, f"1x1x{_MOST_GPUS}", tuple(_gpu_devices(name)))


def _tpu_devices(topology: str) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerMissing("libtpu is not installed; it comes with: pip install 'sv_jax[aot]'")
    from jax.experimental import topologies

    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    one = topology.endswith((":1x1", ":1x1x1"))  # libtpu's default is a host of several
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if one else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **bounds).devices


def _gpu_devices(name: str) -> Sequence[Any]:
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise CompilerMissing(
            "XLA's CUDA compiler is not installed; it comes with: pip install 'sv_jax[aot]'"
        )
    from jax.experimental import topologies

    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name="gpu",
        target_config=_GPU_TEXTS[name],
        topology=f"1x1x{_MOST_GPUS}",
    )
    return described.devices
