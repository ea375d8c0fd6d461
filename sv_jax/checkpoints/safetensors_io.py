"""Reading slices of safetensors files, and writing them tensor by tensor."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from sv_jax.config import UserError

INDEX_NAME = "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SHARD_BYTES = 1 << 30
_PART = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


def refuse_pickle(path: Path) -> None:
    """Raise UserError if `path` is named like a pickle: loading one runs whatever code it contains."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise UserError(
            f"{path.name} looks like a pickle, which can run code when loaded and is never read; "
            "convert it to safetensors"
        )


class TensorSource:
    """The tensors of a directory of safetensors files: one file, shards with an index, or shards without.

    Raises UserError for: no such files (with another text if only pickles are there), a truncated or
    corrupt file, a shard that is missing, a tensor that two files hold.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._file_of: dict[str, Path] = {}
        self._shape_of: dict[str, tuple[int, ...]] = {}
        listed = _read_index(directory)
        for path in _files(directory, listed):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a dictionary)
                    if name in self._file_of:
                        raise UserError(
                            f"tensor {name!r} is in {self._file_of[name].name} and in {path.name}"
                        )
                    self._file_of[name] = path
                    self._shape_of[name] = tuple(file.get_slice(name).get_shape())
        if absent := sorted(set(listed) - set(self._file_of)):
            raise UserError(f"{INDEX_NAME} lists {len(absent)} tensors that no file holds: {_some(absent)}")

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape_of[name]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `index` of one tensor, in its stored dtype; nothing else is read.

        The file is opened for this one read, so that the pages it maps do not add up over a checkpoint.
        """
        path = self._file_of[name]
        with _open(path) as file:
            part = file.get_slice(name)
            if (dtype := part.get_dtype()) not in DTYPES:
                raise UserError(
                    f"tensor {name!r} of {path.name} has dtype {dtype}; allowed: {', '.join(DTYPES)}"
                )
            return part[index] if index else file.get_tensor(name)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / INDEX_NAME
    if not path.exists():
        return {}
    try:
        listed = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a safetensors index: {error!r}") from error
    return {str(name): str(file) for name, file in listed.items()}


def _files(directory: Path, listed: dict[str, str]) -> list[Path]:
    """The safetensors files to read: those of the index, else model*.safetensors, else all there are."""
    if listed:
        names = sorted(set(listed.values()))
        for name in names:
            # A name such as ../../secret would leave the checkpoint's directory.
            if Path(name).name != name:
                raise UserError(f"{INDEX_NAME} names {name!r}; allowed: files of the same directory")
            refuse_pickle(Path(name))
        paths = [directory / name for name in names]
    else:
        paths = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    wanted = dict.fromkeys([*paths, *_parts_by_name(paths)])
    if missing := [path.name for path in wanted if not path.exists()]:
        raise UserError(f"{directory} lacks {len(missing)} weight files: {_some(missing)}")
    if not paths:
        _raise_no_weights(directory)
    return paths


def _parts_by_name(paths: Sequence[Path]) -> Iterator[Path]:
    """Without an index the names alone (-00001-of-00003) say whether a shard is missing."""
    for path in paths:
        if match := _PART.search(path.name):
            stem, width = path.name[: match.start()], len(match[1])
            for part in range(1, int(match[2]) + 1):
                yield path.with_name(f"{stem}-{part:0{width}d}-of-{match[2]}.safetensors")
            return


def _raise_no_weights(directory: Path) -> None:
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix.lower() in PICKLE_SUFFIXES)
    if pickles:
        raise UserError(
            f"{directory} holds pickled weights only ({pickles[0]}), which can run code and are never read; "
            "convert them to safetensors"
        )
    raise UserError(f"{directory} holds no weights; allowed: *.safetensors files")


class _open:
    """safe_open whose failures name the file."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self):
        try:
            self.file = safe_open(self.path, framework="numpy")
            return self.file.__enter__()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.path} is truncated or not a safetensors file: {error}") from error

    def __exit__(self, *details):
        return self.file.__exit__(*details)


# A tensor to write: its name, its shape, and a function that yields its rows in blocks.
Pending = tuple[str, tuple[int, ...], Callable[[], Iterator[np.ndarray]]]


def write_shards(
    directory: Path, tensors: Sequence[Pending], dtype: np.dtype, *, limit: int = SHARD_BYTES
) -> None:
    """Write `tensors` as model*.safetensors of at most `limit` bytes each (one tensor may exceed it).

    Blocks go straight to the file, so memory holds one block at a time, whatever the tensor's size.
    """
    shards = _plan(tensors, dtype, limit)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        one = len(shards) == 1
        name = "model.safetensors" if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / name, shard, dtype)
        weight_map.update({tensor[0]: name for tensor in shard})
    if len(shards) > 1:
        total = sum(_bytes(shape, dtype) for _, shape, _ in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _plan(tensors: Sequence[Pending], dtype: np.dtype, limit: int) -> list[list[Pending]]:
    shards: list[list[Pending]] = [[]]
    size = 0
    for tensor in tensors:
        needed = _bytes(tensor[1], dtype)
        if shards[-1] and size + needed > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += needed
    return shards


def _write_file(path: Path, tensors: Sequence[Pending], dtype: np.dtype) -> None:
    label = next(key for key, value in DTYPES.items() if value == dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, _ in tensors:
        end = offset + _bytes(shape, dtype)
        header[name] = {"dtype": label, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data to 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _, _, blocks in tensors:
            for block in blocks():
                file.write(np.ascontiguousarray(block, dtype=dtype).tobytes())
