"""Results on disk: one JSON object a line, written as they come, so that an interrupted run goes on.

    {"key": "5f0c..", "identity": {"case": "copy/..", "setting": {..}, ..}, "result": {"agreeing": 117, ..}}

The key is a hash of the identity: of everything that the result depends on. A changed model, text, setting or
way of measuring has another key, so that no old result stands in for a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sv_jax.config import UserError


def identity_key(identity: Mapping[str, Any]) -> str:
    """A hash of the identity: the order of its entries does not matter, their values do."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def tokens_hash(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]


class Store:
    """The results of one file; what was there when it was opened, and what was added.

    Raises:
      UserError: the file cannot be read or written, or a line that is not the last is none of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._results: dict[str, Any] = {}
        with self._file_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            # A run that was killed while it wrote leaves a last line without an end.
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                with path.open("r+b") as file:
                    file.truncate(len(whole))
            # Tried before hours are spent on what could not be kept.
            with path.open("ab"):
                pass
        for number, line in enumerate(whole.split(b"\n")[:-1], 1):
            try:
                record = json.loads(line)
                self._results[record["key"]] = record["result"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}, line {number} is not a result; remove the line or choose another --output"
                ) from error

    def __len__(self) -> int:
        return len(self._results)

    def get(self, identity: Mapping[str, Any]) -> Any | None:
        """The result of an identity, None if there is none yet."""
        return self._results.get(identity_key(identity))

    def add(self, results: Sequence[tuple[Mapping[str, Any], Any]]) -> None:
        """Appends (identity, result) pairs; they are on the disk when this returns."""
        lines = []
        for identity, result in results:
            key = identity_key(identity)
            record = {"key": key, "identity": dict(identity), "result": result}
            lines.append(json.dumps(record, allow_nan=False) + "\n")
        with self._file_errors(), self.path.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        self._results |= {identity_key(identity): result for identity, result in results}

    @contextlib.contextmanager
    def _file_errors(self):
        try:
            yield
        except OSError as error:
            raise UserError(f"results {str(self.path)!r}: {error.strerror}") from error
