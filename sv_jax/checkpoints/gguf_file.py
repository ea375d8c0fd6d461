"""Reading GGUF files: metadata at once, tensors row by row, memory-mapped.

The format is simple enough to parse here, with every length checked against the file's size; the `gguf`
package, which does the dequantising, needs 10 seconds and more for a vocabulary of 150,000 entries.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sv_jax.config import UserError

VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensor data, unless general.alignment says otherwise
BLOCK_BYTES = 64 << 20  # float32 bytes dequantised at a time
# The format's value types; 8 is a string, 9 an array.
_NUMBERS = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")
SCALARS = dict(enumerate(_NUMBERS)) | {10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


class _Damaged(Exception):
    """The bytes are not what the format promises."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. shape: as numpy has it, [rows, columns] of a matrix. kind: ggml's type."""

    name: str
    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    start: int
    row_bytes: int

    @property
    def stop(self) -> int:
        return self.start + self.row_bytes * math.prod(self.shape[:-1])


class GgufFile:
    """Metadata and tensors of one GGUF file.

    metadata: key -> int, float, bool, str or list. tensors: name -> GgufTensor.
    Raises UserError if the file is truncated, corrupt, or holds a type that cannot be dequantised.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            cursor = _Cursor(self._data)
            tensor_count, metadata_count = cursor.header()
            self.metadata: dict[str, Any] = dict(cursor.entry() for _ in range(metadata_count))
            infos = [cursor.tensor_info() for _ in range(tensor_count)]
        except (_Damaged, ValueError, OSError) as error:
            raise UserError(f"{path} is truncated or not a GGUF file: {error}") from error
        alignment = int(self.metadata.get("general.alignment", ALIGNMENT)) or ALIGNMENT
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = {info[0]: self._tensor(*info, data_start) for info in infos}

    def _tensor(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, data_start: int
    ) -> GgufTensor:
        from gguf import (
            GGML_QUANT_SIZES,
            GGMLQuantizationType,
        )  # slow to import, and no second start needs it

        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise self._unreadable(name, f"number {number}") from error
        if not _is_readable(kind):
            raise self._unreadable(name, kind.name)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise UserError(
                f"{self.path.name}: {name!r} has rows of {shape[-1]} values, not whole {kind.name} blocks"
            )
        tensor = GgufTensor(name, shape, kind, data_start + offset, shape[-1] // block * block_bytes)
        if tensor.stop > len(self._data):
            raise UserError(
                f"{self.path} is truncated or not a GGUF file: "
                f"{name!r} ends at byte {tensor.stop:,} of {len(self._data):,}"
            )
        return tensor

    def _unreadable(self, name: str, kind: str) -> UserError:
        from gguf import GGMLQuantizationType

        allowed = ", ".join(sorted(known.name for known in GGMLQuantizationType if _is_readable(known)))
        return UserError(f"GGUF tensor {name!r} has type {kind}, which is not supported; allowed: {allowed}")

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """float32 of some rows of a tensor (a vector is one row, returned whole)."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.stop - tensor.start, tensor.start)
        raw = raw.reshape(*tensor.shape[:-1], tensor.row_bytes)
        if len(tensor.shape) == 1:
            return dequantize(raw.copy(), tensor.kind)[rows]
        return dequantize(np.ascontiguousarray(raw[rows]), tensor.kind)

    def blocks(self, name: str, order: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """float32 rows of a tensor in blocks of about BLOCK_BYTES; `order` picks rows in another order.

        Rows are quantised one by one, so they can be reordered before they are dequantised.
        """
        shape = self.shape(name)
        step = max(1, BLOCK_BYTES // (4 * math.prod(shape[1:])))
        for start in range(0, shape[0], step):
            rows = slice(start, start + step)
            yield self.rows(name, rows if order is None else order[rows])


@functools.cache
def _is_readable(kind: Any) -> bool:
    """Whether the installed `gguf` dequantises this type: asked by giving it one block of zeros."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    if kind not in GGML_QUANT_SIZES:
        return False
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class _Cursor:
    """Walks the front part of the file; every step is checked against the file's end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.position = data, 0

    def take(self, count: int) -> int:
        """Advance by `count` bytes; returns where they begin."""
        start = self.position
        if count < 0 or start + count > len(self.data):
            raise _Damaged(f"{count:,} bytes are promised at byte {start:,} of {len(self.data):,}")
        self.position = start + count
        return start

    def number(self, code: str) -> Any:
        form = np.dtype(code)
        return np.frombuffer(self.data, form, 1, self.take(form.itemsize))[0].item()

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self.data, self.take(8))
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def header(self) -> tuple[int, int]:
        """(number of tensors, number of metadata entries)."""
        start = self.take(4)
        if self.data[start : start + 4] != b"GGUF":
            raise _Damaged("it does not begin with GGUF")
        version = self.number("<u4")
        if version not in VERSIONS:
            raise _Damaged(f"version {version}; allowed: {', '.join(map(str, VERSIONS))}, little-endian")
        return self.number("<u8"), self.number("<u8")

    def entry(self) -> tuple[str, Any]:
        key = self.string()
        return key, self.value(self.number("<u4"))

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise _Damaged(f"value type {kind} at byte {self.position:,}")
        kind, length = self.number("<u4"), self.number("<u8")
        if kind in SCALARS:
            form = np.dtype(SCALARS[kind])
            return np.frombuffer(self.data, form, length, self.take(form.itemsize * length)).tolist()
        return [self.string() if kind == STRING else self.value(kind) for _ in range(length)]

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, type number, offset from the start of the data)."""
        name, dimensions = self.string(), self.number("<u4")
        if not 1 <= dimensions <= 4:
            raise _Damaged(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number("<u8") for _ in range(dimensions))[::-1]
        return name, shape, self.number("<u4"), self.number("<u8")
