"""Checkpoint files -> sharded parameters, reading for each device only the slice it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from sv_jax.checkpoints.families import EMBEDDING, HEAD, TABLES, TensorTable
from sv_jax.checkpoints.progress import progress_bar
from sv_jax.checkpoints.safetensors_io import TensorSource
from sv_jax.config import UserError

if TYPE_CHECKING:
    from sv_jax.checkpoints.resolve import Checkpoint

READ_BYTES = 128 << 20  # read and converted at a time; bounds host memory next to the finished slice
TRANSPOSE_BYTES = 1 << 20  # a block that is transposed out of a core's cache
PENDING_BYTES = 512 << 20  # host slices that may wait for their transfer to an accelerator


Bounds = tuple[tuple[int, int], ...]
"""(start, stop) per axis."""


class Source(Protocol):
    """What the loader asks of a checkpoint (TensorSource in production)."""

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray: ...


def load_params(checkpoint: Checkpoint, abstract_params, *, progress: bool = True) -> dict[str, Any]:
    """The parameters of `checkpoint` as a tree like `abstract_params`.

    abstract_params: nested dict of jax.ShapeDtypeStruct (shape, dtype, sharding; no sharding means the
      default device). Everything has the shape that it has in the files, but for kernels: [in, out], where
      the files have [out, in].

    Returns a nested dict of jax.Array with those shapes, dtypes and shardings.
    Raises UserError for tensors that are missing, unread, or of another shape, and for damaged files.
    """
    source, config = TensorSource(checkpoint.directory), checkpoint.config
    return load_from(
        source,
        abstract_params,
        TABLES[config.family],
        tied=config.tie_word_embeddings,
        progress=progress,
    )


def load_from(
    source: Source,
    abstract_params,
    table: TensorTable,
    *,
    tied: bool,
    progress: bool = False,
) -> dict[str, Any]:
    """load_params for any source of tensors and any table."""
    leaves = _flatten(abstract_params)
    tensor_of = _assign(leaves, table)
    wanted = {name for path, leaf in leaves.items() for name in tensors_of(tensor_of[path], leaf)}
    _check_names(source, wanted, table, tied=tied)
    _check_shapes(source, leaves, tensor_of, table)

    loaded: dict[str, jax.Array] = {}
    pending: list[jax.Array] = []
    total = sum(_bytes(leaf) for leaf in leaves.values())
    with progress_bar("loading", total, "B", progress=progress) as bar:
        for path, leaf in leaves.items():
            loaded[path] = load_array(source, tensor_of[path], leaf, transposed=table.is_transposed(path))
            pending.append(loaded[path])
            # Transfers are asynchronous and keep their host slice; do not let them pile up.
            if sum(_bytes(array) for array in pending) > PENDING_BYTES:
                jax.block_until_ready(pending)
                pending = []
            bar.update(_bytes(leaf))
    jax.block_until_ready(pending)
    return _unflatten(loaded)


def tensors_of(name: str, leaf) -> list[str]:
    """The tensors behind a parameter: one, or as many as it has experts where {e} is in the name."""
    return [name.replace("{e}", str(e)) for e in range(leaf.shape[0])] if "{e}" in name else [name]


def load_array(source: Source, name: str, leaf, *, transposed: bool = False) -> jax.Array:
    """One parameter: every distinct slice is read once and put on all devices that hold it.

    name: with {e} in it, the parameter has one tensor of that name for each expert along its first axis.
    transposed: the parameter is the transpose of the (two-dimensional) tensor, or of each of them.
    """
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    devices_of: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), leaf.shape))
        devices_of.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in devices_of.items():
        read = read_transposed if transposed else read_slice
        if "{e}" in name:
            host = read_experts(source, name, bounds, np.dtype(leaf.dtype), read)
        else:
            host = read(source, name, bounds, np.dtype(leaf.dtype))
        shards += [jax.device_put(host, device) for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


Reader = Callable[[Source, str, Bounds, np.dtype], np.ndarray]


def read_slice(source: Source, name: str, bounds: Bounds, dtype: np.dtype) -> np.ndarray:
    """The part of a tensor within `bounds` ((start, stop) per axis), in `dtype`.

    Blocks of rows are converted straight into the result: besides it, memory holds one block.
    """
    rows, *rest = [slice(start, stop) for start, stop in bounds]
    step = max(1, READ_BYTES // max(1, math.prod(part.stop - part.start for part in rest) * 4))
    if step >= rows.stop - rows.start:  # small: convert what was read, without a copy where possible
        return np.ascontiguousarray(source.read(name, (rows, *rest)), dtype)
    out = np.empty([stop - start for start, stop in bounds], dtype)
    for start in range(rows.start, rows.stop, step):
        block = source.read(name, (slice(start, min(start + step, rows.stop)), *rest))
        out[start - rows.start :][: len(block)] = block
    return out


def read_transposed(source: Source, name: str, bounds: Bounds, dtype: np.dtype) -> np.ndarray:
    """The part of a matrix's transpose within `bounds`, which are those of the transpose; as `read_slice`."""
    (first, last), columns = bounds
    out = np.empty((last - first, columns[1] - columns[0]), dtype)
    step = max(1, TRANSPOSE_BYTES // (4 * len(out)))
    for start in range(*columns, step):
        stop = min(start + step, columns[1])
        block = source.read(name, (slice(start, stop), slice(first, last)))
        out[:, start - columns[0] : stop - columns[0]] = block.T
    return out


def read_experts(source: Source, name: str, bounds: Bounds, dtype: np.dtype, read: Reader) -> np.ndarray:
    """The part of all experts' tensors within `bounds`, the first of which says which experts; as `read`."""
    experts, *rest = bounds
    out = np.empty([stop - start for start, stop in bounds], dtype)
    for expert in range(*experts):
        out[expert - experts[0]] = read(source, name.replace("{e}", str(expert)), tuple(rest), dtype)
    return out


def _bytes(leaf) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat.update(_flatten(value, f"{path}/") if isinstance(value, Mapping) else {path: value})
    return flat


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _assign(leaves: Mapping[str, Any], table: TensorTable) -> dict[str, str]:
    named = {path: table.tensor_name(path) for path in leaves}
    if unknown := [path for path, tensor in named.items() if tensor is None]:
        raise UserError(f"no tensor is known for {_listed(unknown, 'parameters')}")
    return {path: tensor for path, tensor in named.items() if tensor is not None}


def _listed(names, what: str) -> str:
    names = sorted(names)
    return f"{len(names)} {what}: {', '.join(names[:10])}" + (", ..." if len(names) > 10 else "")


def _check_names(source: Source, wanted: set[str], table: TensorTable, *, tied: bool) -> None:
    """Everything wanted is there, and everything that is there is wanted, skipped or a tied duplicate."""
    there = source.names()
    if missing := wanted - there:
        hint = "; config.json has tie_word_embeddings=false, which needs a head" if HEAD in missing else ""
        raise UserError(f"the checkpoint lacks {_listed(missing, 'tensors')}{hint}")
    unread = {name for name in there - wanted if not table.is_skipped(name)}
    if tied and HEAD in unread and EMBEDDING in there:
        _check_duplicate(source)
        unread.discard(HEAD)
    if unread:
        raise UserError(f"the model has no place for {_listed(unread, 'tensors')} of the checkpoint")


def _check_duplicate(source: Source) -> None:
    """A head that is stored although tied must be the embedding; else one of the two would be lost."""
    rows, columns = source.shape(EMBEDDING)
    same = source.shape(HEAD) == (rows, columns)
    step = max(1, READ_BYTES // (columns * 4))
    for start in range(0, rows if same else 0, step):
        index = (slice(start, min(start + step, rows)), slice(0, columns))
        same = same and np.array_equal(source.read(EMBEDDING, index), source.read(HEAD, index))
    if not same:
        raise UserError(
            f"{HEAD} differs from {EMBEDDING} although config.json has tie_word_embeddings=true; "
            "allowed: an identical copy, no head, or tie_word_embeddings=false"
        )


def _check_shapes(
    source: Source, leaves: Mapping[str, Any], tensor_of: Mapping[str, str], table: TensorTable
) -> None:
    for path, leaf in leaves.items():
        shape = tuple(leaf.shape)[1:] if "{e}" in tensor_of[path] else tuple(leaf.shape)
        expected = shape[::-1] if table.is_transposed(path) else shape
        for name in tensors_of(tensor_of[path], leaf):
            if (found := source.shape(name)) != expected:
                raise UserError(f"tensor {name!r} has shape {found}; the config asks for {expected}")
