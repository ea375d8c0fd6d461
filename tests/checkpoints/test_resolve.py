"""resolve(): every way to name a model, the cache directory, concurrency, end tokens."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import tempfile
import threading
from pathlib import Path

import pytest

from sv_jax.checkpoints import cache as caches
from sv_jax.checkpoints import gguf_convert, hub, resolve, wheels
from sv_jax.checkpoints.hf_config import model_config
from sv_jax.checkpoints.resolve import PROVENANCE_NAME, eos_token_ids
from sv_jax.config import UserError
from tests.checkpoints import tiny, tiny_gguf

CONFIG = model_config(tiny.config_dict("llama", vocab_size=len(tiny_gguf.vocabulary())))


@pytest.fixture
def gguf(tmp_path) -> Path:
    return tiny_gguf.write(tmp_path / "tiny.gguf", CONFIG, tiny.tensors(CONFIG))


def test_unknown_names_say_what_is_known(tmp_path):
    message = (
        "unknown model 'smollm': known names are smollm2-135m, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, "
        "smollm2-135m-moe, or a directory, a .gguf file, or a hub id org/name"
    )
    with pytest.raises(UserError) as caught:
        resolve("smollm", cache_directory=tmp_path)
    assert str(caught.value) == message


@pytest.mark.parametrize("model", ["./nothing", "/nothing/here", "~/nothing-here", "nothing.gguf"])
def test_paths_that_are_not_there(tmp_path, model):
    with pytest.raises(UserError, match="no such file or directory"):
        resolve(model, cache_directory=tmp_path)


def test_unknown_dtype(tmp_path):
    with pytest.raises(UserError, match="dtype 'float16' is not supported; allowed: float32, bfloat16"):
        resolve("smollm2-135m", dtype="float16", cache_directory=tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.pth", "x.ckpt"])
def test_a_pickle_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04N.")
    with pytest.raises(UserError, match="looks like a pickle, which can run code when loaded"):
        resolve(str(tmp_path / name), cache_directory=tmp_path)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("?")
    with pytest.raises(UserError, match=r"is a file of another kind; allowed: \.gguf, or a directory"):
        resolve(str(tmp_path / "notes.txt"), cache_directory=tmp_path)


def test_a_directory_is_used_where_it_is(tmp_path):
    tiny.save(tmp_path / "model", tiny.config_dict("qwen3"), {})
    checkpoint = resolve(str(tmp_path / "model"), cache_directory=tmp_path / "cache")
    assert checkpoint.directory == tmp_path / "model"
    assert checkpoint.provenance == f"{tmp_path / 'model'}, local directory"
    assert checkpoint.sha256 is None
    assert not (tmp_path / "cache").exists()


def test_a_gguf_is_converted_once(tmp_path, gguf, monkeypatch):
    first = resolve(str(gguf), cache_directory=tmp_path / "cache", progress=False)
    assert first.provenance.startswith("tiny.gguf, dequantised from a local GGUF (sha256 ")
    assert first.sha256 == hashlib.sha256(gguf.read_bytes()).hexdigest()
    monkeypatch.setattr(gguf_convert, "convert", None)
    monkeypatch.setattr(wheels, "file_sha256", None)  # a second start does not read the weights at all
    assert resolve(str(gguf), cache_directory=tmp_path / "cache") == first


def test_a_changed_gguf_is_converted_again(tmp_path, gguf):
    first = resolve(str(gguf), cache_directory=tmp_path / "cache", progress=False)
    os.utime(gguf, ns=(1, 1))
    second = resolve(str(gguf), cache_directory=tmp_path / "cache", progress=False)
    assert second.directory != first.directory


def test_both_dtypes_live_side_by_side(tmp_path, gguf):
    names = {
        resolve(str(gguf), dtype=d, cache_directory=tmp_path, progress=False).directory
        for d in gguf_convert.DTYPES
    }
    assert len(names) == 2


def test_a_failed_conversion_leaves_nothing(tmp_path, gguf, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_convert.safetensors_io, "write_shards", fail)
    with pytest.raises(UserError, match="disk full while writing to"):
        resolve(str(gguf), cache_directory=tmp_path / "cache", progress=False)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() or ".partial" in path.name]


def test_concurrent_starts_end_with_one_whole_copy(tmp_path, gguf, monkeypatch):
    ready = threading.Barrier(4)
    publish = caches.publish

    def publish_together(source, target):
        ready.wait(timeout=60)  # all four have converted before the first one renames
        publish(source, target)

    monkeypatch.setattr(caches, "publish", publish_together)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(resolve, str(gguf), cache_directory=tmp_path / "cache", progress=False)
            for _ in range(4)
        ]
        found = {job.result().directory for job in jobs}
    assert len(found) == 1
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"converted"}
    assert (found.pop() / PROVENANCE_NAME).exists()


def test_an_unwritable_cache_falls_back_and_says_so(tmp_path, gguf, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("in the way")  # works for root too, unlike permission bits
    cache, said = tmp_path / "file" / "cache", []
    first = resolve(str(gguf), cache_directory=cache, progress=False, notify=said.append)
    assert len(said) == 1 and said[0].startswith(
        f"cache directory {cache} is not writable; using {tmp_path}/sv_jax-"
    )
    second = resolve(str(gguf), cache_directory=cache, progress=False, notify=said.append)
    assert second == first and len(said) == 1  # found there again, silently


def test_a_foreign_temporary_directory_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    caches.fallback_path().symlink_to(tmp_path / "elsewhere")
    assert not caches.is_own(caches.fallback_path())
    assert caches.fallback_directory() != caches.fallback_path()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SV_JAX_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/sv_jax"),
        ({"HOME": "/h"}, "/h/.cache/sv_jax"),
    ],
)
def test_default_cache_directory(monkeypatch, environment, expected):
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("SV_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert caches.default_cache_directory() == Path(expected)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5,)),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": []}, {"eos_token_id": [7, 8]}, (7, 8)),
        (None, {"eos_token_id": 0}, (0,)),
        ({}, {}, ()),
        (None, {}, ()),
    ],
)
def test_end_tokens(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}, None, "missing"])
def test_the_end_token_of_the_tokenizer_is_the_last_resort(tmp_path, gguf, eos):
    directory = resolve(str(gguf), cache_directory=tmp_path / "cache", progress=False).directory
    (directory / "generation_config.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert eos_token_ids(directory) == ((2,) if eos not in (None, "missing") else ())


class TestHub:
    """The hub itself is never asked: its client is replaced by one that answers or raises."""

    @pytest.fixture(autouse=True)
    def _client(self, monkeypatch):
        import huggingface_hub

        self.calls: list[dict] = []

        def answer(model, **options):
            self.calls.append(options)
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return str(self.outcome)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)

    def test_a_hub_model_is_a_directory(self, tmp_path):
        tiny.save(tmp_path / "snapshot", tiny.config_dict("llama"), {})
        self.outcome = tmp_path / "snapshot"
        checkpoint = resolve("org/name", cache_directory=tmp_path)
        assert checkpoint.provenance == "org/name, from the hub"
        assert checkpoint.directory == tmp_path / "snapshot"
        assert not {"*.bin", "*.py"} & set(self.calls[0]["allow_patterns"])

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("GatedRepoError", "no", "'org/name' is gated: accept its licence"),
            ("RepositoryNotFoundError", "no", "is not on the hub, or it is private"),
            ("LocalTokenNotFoundError", "no", "needs a token: run `hf auth login` or set HF_TOKEN"),
            (
                "LocalEntryNotFoundError",
                "offline",
                "not in the local hub cache and the hub cannot be reached",
            ),
            ("HfHubHTTPError", "500 oops\nbody", "the hub refused 'org/name': 500 oops"),
            ("HFValidationError", "bad id", "is not a valid hub id: bad id"),
            (OSError, "no route", r"cannot be reached \(no route\); go online, or name a local directory"),
            (RuntimeError, "no route", "could not be fetched from the hub: no route"),
        ],
    )
    def test_errors_say_what_to_do(self, name, text, message):
        from huggingface_hub import errors

        kind = getattr(errors, name) if isinstance(name, str) else name
        self.outcome = kind.__new__(kind, text)  # their constructors want an HTTP response, each another one
        Exception.__init__(self.outcome, text)
        with pytest.raises(UserError, match=message) as caught:
            hub.fetch("org/name")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("model", "expected"), [("a/b", True), ("a", False), ("a/b/c", False), ("a b/c", False)]
    )
    def test_ids(self, model, expected):
        assert hub.is_hub_id(model) is expected
