"""Where fetched and converted checkpoints live, and how they appear there: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from sv_jax.config import UserError

PARTIAL_PREFIX = ".partial-"
STALE_SECONDS = 24 * 3600.0  # a partial directory this old belongs to a process that was killed


def default_cache_directory() -> Path:
    """$SV_JAX_CACHE, else the platform's per-user cache directory with `sv_jax` appended."""
    if override := os.environ.get("SV_JAX_CACHE"):
        return Path(override).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "sv_jax"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "sv_jax"
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "sv_jax"
    return _home() / ".cache" / "sv_jax"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a container user without a passwd entry and without $HOME
        return Path(tempfile.gettempdir())


def fallback_path() -> Path:
    """Where files go when the cache directory cannot be written; the same at every start."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"sv_jax-{user}"


def is_own(path: Path) -> bool:
    """Whether `path` is a directory of this user.

    The fallback's name is predictable, so on a shared machine somebody else may have made it first.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and (not hasattr(os, "getuid") or status.st_uid == os.getuid())


def fallback_directory() -> Path:
    """`fallback_path()`, created; another temporary directory if it is not ours to use."""
    path = fallback_path()
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
    return path if is_own(path) and is_writable(path) else Path(tempfile.mkdtemp(prefix="sv_jax-"))


def is_writable(directory: Path) -> bool:
    """Whether files can really be made in `directory` (created when missing).

    Permission bits do not tell: read-only mounts, quotas and root all differ from them.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def writable_cache(directory: Path, notify: Callable[[str], None]) -> Path:
    """`directory` if files can be made there, else a temporary directory (said through `notify`)."""
    if is_writable(directory):
        remove_stale(directory)
        return directory
    fallback = fallback_directory()
    notify(f"cache directory {directory} is not writable; using {fallback} (set SV_JAX_CACHE to choose one)")
    return fallback


def remove_stale(directory: Path) -> None:
    """Delete what killed processes left half-written more than a day ago."""
    for partial in directory.glob(f"{PARTIAL_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def scratch_directory(cache: Path) -> Iterator[Path]:
    """A fresh directory inside `cache` (same file system, so renames are atomic), removed at the end."""
    path = cache / f"{PARTIAL_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(source: Path, target: Path) -> None:
    """Rename the finished `source` to `target`; when another process was faster, keep what it made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(source, target)
    except OSError:
        # Both processes produce the same bytes from the same input, so either copy will do.
        if not target.exists():
            raise


def check_space(directory: Path, needed: int) -> None:
    """Raise UserError unless `needed` more bytes fit on the file system of `directory`."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"disk full: {directory} has {free:,} bytes free and {needed:,} are needed; "
            "free some or point SV_JAX_CACHE at another disk"
        )


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turn 'no space left' and 'quota exceeded' raised inside the block into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            raise UserError(
                f"disk full while writing to {directory}; free some space or point SV_JAX_CACHE elsewhere"
            ) from error
        raise
