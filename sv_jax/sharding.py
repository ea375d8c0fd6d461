"""One table from logical axes to mesh axes, and what follows from it for a model and a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sv_jax.config import DEFAULT_CUTS, Cuts, ModelConfig, UserError

DATA, MODEL = "data", "model"
COLLECTIVE_TIMEOUT_SECONDS = 600

MeshAxes = str | tuple[str, ...] | None

LOGICAL_AXES: dict[str, MeshAxes] = {
    "batch": DATA,
    "kv_length": None,  # positions of the cache
    "heads": MODEL,
    "kv_heads": MODEL,
    "ffn": MODEL,
    "experts": MODEL,
    "all_experts": None,  # the router's outputs: each device chooses among all
    "one": None,
    "vocab": MODEL,
    "embed": None,
    "head_dim": None,
}


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh ("data", "model") and the logical axes that are cut over it. Hashable: a static argument."""

    mesh: Mesh
    replicated: frozenset[str] = frozenset()  # logical axes that do not divide and stay whole
    cuts: Cuts = DEFAULT_CUTS

    def spec(self, *logical: str | None) -> PartitionSpec:
        """PartitionSpec of an array with these logical axes; None for an axis without a name."""
        return PartitionSpec(
            *(None if a is None or a in self.replicated else _axes_of(a, self.cuts) for a in logical)
        )

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes that a logical axis is cut over; (): it is whole on each device."""
        return () if logical in self.replicated else _as_tuple(_axes_of(logical, self.cuts))

    def parts(self, logical: str) -> int:
        """Into how many parts a logical axis is cut."""
        return math.prod(self.mesh.shape[axis] for axis in self.mesh_axes(logical))

    def named(self, *logical: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(*logical))

    def constrain(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """Pins the sharding of an intermediate array inside jit; no operation on one device."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.named(*logical))

    def first_slot(self, slots: int) -> int | jax.Array:
        """Within `on_shards`: the position in a row's cache at which this device's `slots` slots begin."""
        axes = self.mesh_axes("kv_length")
        return jax.lax.axis_index(axes) * slots if self.parts("kv_length") > 1 else 0

    @property
    def data_size(self) -> int:
        """Into how many parts the rows of a batch are cut."""
        return self.parts("batch")

    @property
    def model_size(self) -> int:
        return self.mesh.shape[MODEL]

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def describe(self) -> str:
        """One line for a person: devices, and what stays whole on each of them."""
        text = f"mesh {self.mesh.shape[DATA]}x{self.model_size} (data x model) of {self.platform} devices"
        if self.model_size > 1 and self.replicated:
            whole = "attention" if "heads" in self.replicated else ""
            whole += (" and " if whole else "") + "vocabulary" if "vocab" in self.replicated else ""
            text += f"; {whole} replicated over model (does not divide by {self.model_size})"
        return text


@dataclasses.dataclass(frozen=True)
class PlannedSharding(Sharding):
    """Of devices that are not here: its shards have shapes, and nothing can be put on them."""

    planned_platform: str = "cpu"  # "cpu", "gpu" or "tpu"

    @property
    def platform(self) -> str:
        return self.planned_platform


Axes = tuple[str | None, ...]


def on_shards(
    function: Callable[..., Any], sharding: Sharding, inputs: Sequence[Axes], outputs: Any
) -> Callable[..., Any]:
    """The function, run by each device on its own shards: what XLA cannot cut, or would cut badly.

    Args:
      inputs: logical axes of each argument. outputs: of the result, or a tuple of them for several results.
    """
    if sharding.mesh.size == 1:
        return function
    several = isinstance(outputs[0], tuple)
    specs = tuple(sharding.spec(*axes) for axes in outputs) if several else sharding.spec(*outputs)
    return jax.shard_map(
        function,
        mesh=sharding.mesh,
        in_specs=tuple(sharding.spec(*axes) for axes in inputs),
        out_specs=specs,
        check_vma=False,
    )


def parse_mesh(text: str) -> tuple[int, int]:
    """ "4x2" -> (4, 2): data shards x model shards. Raises UserError for anything else."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise UserError(f"--mesh {text!r} is not DATAxMODEL with two positive numbers, such as 4x2")
    return int(parts[0]), int(parts[1])


def ensure_devices(count: int) -> None:
    """Makes `count` devices available, emulating them on CPU. Call before JAX is used for anything else.

    Raises UserError where the platform has fewer devices and cannot emulate.
    """
    if count > 1:
        _allow_slow_collectives()
        # Harmless where CPU is not the platform; RuntimeError: the backend is up, with what it has.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    available = jax.devices()
    if len(available) >= count:
        return
    if available[0].platform == "cpu":
        raise UserError(
            f"a mesh of {count} devices needs JAX to emulate them, but JAX is already running with "
            f"{len(available)}; create the mesh before anything else uses JAX"
        )
    raise UserError(
        f"a mesh of {count} devices is larger than the {len(available)} {available[0].platform} devices "
        f"here; use a smaller --mesh, or set JAX_PLATFORMS=cpu to emulate {count} devices"
    )


def _allow_slow_collectives() -> None:
    """Keeps XLA from ending the process when emulated devices wait long for each other.

    Eight devices on two busy cores reach a collective far apart; XLA's CPU client gives up after 40 seconds
    by default. XLA reads the variable when the first backend starts; what the user has set stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for name in ("collective_call_terminate_timeout_seconds", "collective_call_warn_stuck_timeout_seconds"):
        if name not in flags:
            flags += f" --xla_cpu_{name}={COLLECTIVE_TIMEOUT_SECONDS}"
    os.environ["XLA_FLAGS"] = flags.strip()


def _axes_of(logical: str, cuts: Cuts) -> MeshAxes:
    """The mesh axes that a logical axis is cut over."""
    if cuts.kv_shard == "data" and logical in ("batch", "kv_length"):
        return DATA if logical == "kv_length" else None
    if cuts.expert_shard == "all" and logical == "experts":
        return DATA, MODEL
    return LOGICAL_AXES[logical]


def _as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()


def _cut_sizes(config: ModelConfig, cuts: Cuts) -> dict[str, tuple[int, tuple[str, ...]]]:
    """What has to divide by the mesh axes that it is cut over: sizes by name, with these axes."""
    sizes = {}
    if not all(config.has_experts(layer) for layer in range(config.num_layers)):
        sizes["intermediate_size"] = config.intermediate_size, _as_tuple(_axes_of("ffn", cuts))
    if config.moe is not None:
        sizes["num_experts"] = config.moe.num_experts, _as_tuple(_axes_of("experts", cuts))
        if config.moe.shared_expert_size:
            sizes["shared_expert_intermediate_size"] = (
                config.moe.shared_expert_size,
                _as_tuple(_axes_of("ffn", cuts)),
            )
    return sizes


def _check_division(config: ModelConfig, mesh_shape: dict[str, int], cuts: Cuts) -> None:
    """Raises UserError for the first size that does not divide, with the numbers of shards that all allow."""
    sizes = _cut_sizes(config, cuts)
    for name, (size, axes) in sizes.items():
        shards = math.prod(mesh_shape[axis] for axis in axes)
        if size % shards == 0:
            continue
        together = [other for other, others_axes in sizes.values() if others_axes == axes]
        divisors = [n for n in range(2, 65) if all(other % n == 0 for other in together)]
        shape = "x".join(str(mesh_shape[axis]) for axis in axes)
        what = f"a {axes[0]} axis of {shape}" if len(axes) == 1 else f"a mesh of {shape} = {shards} devices"
        raise UserError(
            f"{what} does not divide {name}={size}; allowed: {', '.join(map(str, [1, *divisors]))}"
        )


def _whole_axes(config: ModelConfig, model: int) -> frozenset[str]:
    """Logical axes that do not divide by the model axis and may stay whole on each device."""
    whole = set()
    if config.num_heads % model or config.num_kv_heads % model:
        whole |= {"heads", "kv_heads"}
    if config.vocab_size % model:
        whole.add("vocab")
    return frozenset(whole)


def shard_model(config: ModelConfig, mesh: Mesh, cuts: Cuts = DEFAULT_CUTS) -> Sharding:
    """Sharding of a model on a mesh ("data", "model").

    Attention heads (or the vocabulary) that do not divide by M are kept whole on each device; an FFN, or a
    number of experts, that does not divide by the devices it is cut over is refused, since then nearly
    everything would be computed M times over.
    """
    _check_division(config, dict(mesh.shape), cuts)
    return Sharding(mesh, _whole_axes(config, mesh.shape[MODEL]), cuts)


def make_sharding(
    config: ModelConfig, mesh_shape: tuple[int, int] = (1, 1), cuts: Cuts = DEFAULT_CUTS
) -> Sharding:
    """Sharding of a model on the first D*M devices, see `shard_model`."""
    data, model = mesh_shape
    _check_division(config, {DATA: data, MODEL: model}, cuts)  # before devices are looked for
    ensure_devices(data * model)
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    mesh = Mesh(devices, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))
    return shard_model(config, mesh, cuts)


def plan_sharding(
    config: ModelConfig, mesh_shape: tuple[int, int], platform: str, cuts: Cuts = DEFAULT_CUTS
) -> PlannedSharding:
    """What `make_sharding` would make on devices of `platform` ("cpu", "gpu", "tpu"); it needs none of them.

    Raises UserError where `make_sharding` does for what does not divide.
    """
    data, model = mesh_shape
    _check_division(config, {DATA: data, MODEL: model}, cuts)
    mesh = AbstractMesh(mesh_shape, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))
    # An abstract mesh has the shape and the names of a Mesh, which is all that shapes of shards ask for.
    return PlannedSharding(cast(Mesh, mesh), _whole_axes(config, model), cuts, platform)
