"""Writes a sparsity file, which `sparsity.config.read_sparsity` reads."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sv_jax.config import UserError
from sv_jax.sparsity.config import PARTS, SparsityConfig, read_sparsity


def check_target(path: Path, *, force: bool) -> None:
    """Raises UserError where `write_sparsity` could not put its file, or would overwrite one."""
    label = f"--output {str(path)!r}"
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"{label}: {str(folder)!r} is no directory; allowed: a file in one that exists")
    if path.is_dir():
        raise UserError(f"{label} is a directory; allowed: the name of a file")
    if path.exists() and not force:
        raise UserError(f"{label} is there already; allowed: another name, or --force to overwrite it")
    try:  # permission bits do not tell
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{label}: {error.strerror}; allowed: a file where files can be written") from error


def write_sparsity(
    path: Path,
    sparsity: SparsityConfig,
    provenance: Mapping[str, Any],
    *,
    heading: Sequence[str] = (),
    remarks: Sequence[str] = (),
    force: bool,
) -> None:
    """Puts a sparsity file in place, whole or not at all, once it has been read back.

    Args:
      sparsity: its own provenance is not used.
      provenance: text, numbers, truth values, and lists of them. None is left out.
      heading, remarks: lines of comments above and below.
      force: whether a file that is there is overwritten.

    Raises:
      UserError: see `check_target`; the disk is full.
    """
    check_target(path, force=force)
    known = {key: _plain(value) for key, value in provenance.items() if value is not None}
    text = render(sparsity, known, heading=heading, remarks=remarks)
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with new.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        told = dataclasses.replace(sparsity, provenance=tuple(known.items()))
        assert read_sparsity(new) == told, text
        new.replace(path)
    except OSError as error:
        raise UserError(f"--output {str(path)!r}: {error.strerror}") from error
    finally:
        new.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """As it is read back: lists, and text that UTF-8 has (a path may have other bytes)."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def render(
    sparsity: SparsityConfig,
    provenance: Mapping[str, Any],
    *,
    heading: Sequence[str] = (),
    remarks: Sequence[str] = (),
) -> str:
    """The file's text. What is None or empty is left out."""
    lines = _comments(heading)
    for part in PARTS:
        if getattr(sparsity, part) is None:
            continue
        figures = {
            name.replace("_", "-"): value
            for name, value in dataclasses.asdict(getattr(sparsity, part)).items()
            if value is not None and value != ()
        }
        lines += [*([""] if lines and not lines[-1].startswith("#") else []), f"[{part}]", *_entries(figures)]
    if provenance:
        lines += ["", "[provenance]", *_entries(provenance)]
    if remarks:
        lines += ["", *_comments(remarks)]
    return "\n".join(lines) + "\n"


def _comments(lines: Sequence[str]) -> list[str]:
    # No control characters in TOML's comments, and no line may end one.
    return [f"# {''.join(c if c.isprintable() else '?' for c in line)}".rstrip() for line in lines]


def _entries(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {toml_value(value)}" for key, value in table.items()]


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else toml_value(key)


def toml_value(value: Any) -> str:
    """A value in TOML. Raises TypeError for what it has no spelling for here."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's strings are TOML's basic ones but for DEL. Characters stay as they are: escaped, those beyond
        # 16 bits would be two surrogates, which TOML does not take.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return float.__repr__(value)  # NumPy's are floats, with another repr
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    raise TypeError(f"{value!r} is no text, number, truth value or list")
