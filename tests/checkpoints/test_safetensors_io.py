"""Files of weights: shards with and without an index, damage, pickles, and the writer."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sv_jax.checkpoints.safetensors_io import INDEX_NAME, TensorSource, write_shards
from sv_jax.config import UserError

CONTENTS = {name: np.arange(12, dtype=np.float32).reshape(3, 4) + i for i, name in enumerate("abc")}


def _shards(directory, *, index: bool = True, count: int = 3) -> None:
    for i, (name, value) in enumerate(CONTENTS.items(), 1):
        save_file({name: value}, directory / f"model-{i:05d}-of-{count:05d}.safetensors")
    if index:
        weight_map = {name: f"model-{i:05d}-of-00003.safetensors" for i, name in enumerate(CONTENTS, 1)}
        (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
def test_shards_read_like_one_file(tmp_path, index):
    _shards(tmp_path, index=index)
    source = TensorSource(tmp_path)
    assert source.names() == set(CONTENTS)
    for name, value in CONTENTS.items():
        assert source.shape(name) == (3, 4)
        np.testing.assert_array_equal(source.read(name, (slice(1, 3), slice(0, 2))), value[1:3, :2])


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(tmp_path, index):
    _shards(tmp_path, index=index)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks 1 weight files: model-00002-of-00003\.safetensors"):
        TensorSource(tmp_path)


def test_an_index_that_lists_more_than_the_files_hold(tmp_path):
    _shards(tmp_path)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight_map"]["d"] = "model-00001-of-00003.safetensors"
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(UserError, match="lists 1 tensors that no file holds: d"):
        TensorSource(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_a_broken_index(tmp_path, text):
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(UserError, match="is not a safetensors index"):
        TensorSource(tmp_path)


def test_an_index_cannot_point_outside(tmp_path):
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "../other/model.safetensors"}}))
    with pytest.raises(UserError, match="allowed: files of the same directory"):
        TensorSource(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    save_file({"a": CONTENTS["a"]}, tmp_path / "x.safetensors")
    save_file({"a": CONTENTS["a"]}, tmp_path / "y.safetensors")
    with pytest.raises(UserError, match=r"tensor 'a' is in x\.safetensors and in y\.safetensors"):
        TensorSource(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_files(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file(CONTENTS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated or not a safetensors file"):
        TensorSource(tmp_path)


def test_a_corrupt_header(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(CONTENTS, path)
    data = bytearray(path.read_bytes())
    data[8:24] = b"\xff" * 16
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match="is truncated or not a safetensors file"):
        TensorSource(tmp_path)


def test_integers_are_not_weights(tmp_path):
    save_file({"a": np.ones((2, 2), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'a' of model\.safetensors has dtype I8; allowed: F32, F16, BF16"):
        TensorSource(tmp_path).read("a", (slice(0, 2), slice(0, 2)))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04N.")
    with pytest.raises(UserError, match=rf"holds pickled weights only \({name}\).*never read"):
        TensorSource(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="looks like a pickle"):
        TensorSource(tmp_path)


def test_an_empty_directory(tmp_path):
    with pytest.raises(UserError, match=r"holds no weights; allowed: \*\.safetensors files"):
        TensorSource(tmp_path)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("limit", [1 << 30, 100, 1])
def test_the_writer_writes_what_safetensors_reads(tmp_path, dtype, limit):
    def blocks(value):
        return lambda: iter(np.split(value, [1, 2]))

    pending = [(name, value.shape, blocks(value)) for name, value in CONTENTS.items()]
    write_shards(tmp_path, pending, np.dtype(dtype), limit=limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    size = 48 if dtype is np.float32 else 24
    assert len(files) == -(-3 // max(1, min(3, limit // size)))
    read = {name: value for path in files for name, value in load_file(path).items()}
    assert (tmp_path / INDEX_NAME).exists() == (len(files) > 1)
    assert read.keys() == CONTENTS.keys()
    for name, value in CONTENTS.items():
        np.testing.assert_array_equal(read[name], value.astype(dtype))
    assert TensorSource(tmp_path).names() == set(CONTENTS)
