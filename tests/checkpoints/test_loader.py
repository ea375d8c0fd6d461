"""Loading: every family, one device and meshes, and checkpoints that are wrong."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sv_jax.checkpoints import load_params, loader
from sv_jax.checkpoints.families import TABLES
from sv_jax.checkpoints.hf_config import model_config
from sv_jax.checkpoints.resolve import Checkpoint
from sv_jax.checkpoints.safetensors_io import TensorSource
from sv_jax.config import UserError
from tests.checkpoints import tiny

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VARIANTS = {
    "llama": tiny.config_dict("llama"),
    "llama with biases": tiny.config_dict("llama", attention_bias=True, mlp_bias=True),
    "llama tied": tiny.config_dict("llama", tie_word_embeddings=True),
    "mistral": tiny.config_dict("mistral", sliding_window=16),
    "qwen2": tiny.config_dict("qwen2"),
    "qwen2 tied": tiny.config_dict("qwen2", tie_word_embeddings=True),
    "qwen3": tiny.config_dict("qwen3"),
    "qwen3 with biases": tiny.config_dict("qwen3", attention_bias=True),
    "mixtral": tiny.config_dict("mixtral", num_local_experts=4),
    "qwen2_moe": tiny.config_dict("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=20),
    "qwen2_moe with a dense layer": tiny.config_dict("qwen2_moe", **EXPERTS, mlp_only_layers=[0]),
    "qwen3_moe": tiny.config_dict("qwen3_moe", **EXPERTS),
    "olmoe": tiny.config_dict("olmoe", num_experts=4, num_experts_per_tok=2),
}


def _mesh_of(shape: tuple[int, int]) -> Mesh:
    return Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("data", "model"))


def _cut_where_it_divides(mesh: Mesh, axis: int):
    """Shards axis `axis` of every array over "model" where it divides; the rest is replicated."""

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding:
        at = axis % len(shape)
        divides = shape[at] % mesh.shape["model"] == 0
        names = [("model" if at == i and divides else None) for i in range(len(shape))]
        return NamedSharding(mesh, PartitionSpec(*names))

    return place


@pytest.mark.parametrize("name", VARIANTS)
def test_every_family_loads_exactly(tmp_path, name):
    config = model_config(VARIANTS[name])
    contents = tiny.tensors(config)
    checkpoint = tiny.save(tmp_path, VARIANTS[name], contents)
    loaded = load_params(checkpoint, tiny.tree(config), progress=False)
    tiny.assert_same(loaded, tiny.expected(contents, config))


@pytest.mark.parametrize("axis", [0, 1, 2])  # of experts, all three; of matrices, the first once more
@pytest.mark.parametrize("shape", [(1, 1), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe"])
def test_meshes_hold_their_slices(tmp_path, axis, shape, name):
    config = model_config(VARIANTS[name])
    contents = tiny.tensors(config)
    checkpoint = tiny.save(tmp_path, VARIANTS[name], contents, shards=3)
    abstract = tiny.tree(config, place=_cut_where_it_divides(_mesh_of(shape), axis))
    loaded = load_params(checkpoint, abstract, progress=False)
    tiny.assert_same(loaded, tiny.expected(contents, config))
    for got, asked in zip(jax.tree.leaves(loaded), jax.tree.leaves(abstract)):
        assert got.sharding == asked.sharding
        assert len(got.addressable_shards) == shape[0] * shape[1]


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, ml_dtypes.bfloat16])
def test_dtypes_convert_by_rounding(tmp_path, stored, wanted):
    config = model_config(VARIANTS["llama"])
    contents = {name: value.astype(stored) for name, value in tiny.tensors(config).items()}
    checkpoint = tiny.save(tmp_path, VARIANTS["llama"], contents)
    loaded = load_params(checkpoint, tiny.tree(config, dtype=wanted), progress=False)
    converted = {name: value.astype(wanted) for name, value in contents.items()}
    tiny.assert_same(loaded, tiny.expected(converted, config))


class Recorder:
    """A source that notes what it is asked for."""

    def __init__(self, source: TensorSource):
        self.source, self.reads = source, []
        self.names, self.shape = source.names, source.shape

    def read(self, name, index):
        self.reads.append((name, tuple((part.start, part.stop) for part in index)))
        return self.source.read(name, index)


def test_only_slices_are_read_and_each_once(tmp_path):
    config = model_config(VARIANTS["llama"])
    checkpoint = tiny.save(tmp_path, VARIANTS["llama"], tiny.tensors(config))
    recorder = Recorder(TensorSource(checkpoint.directory))
    # 4 replicas of 2 halves: every half must be read once, never once per replica, never the whole.
    abstract = tiny.tree(config, place=_cut_where_it_divides(_mesh_of((4, 2)), 0))
    loader.load_from(recorder, abstract, TABLES["llama"], tied=False)
    assert len(recorder.reads) == len(set(recorder.reads)) == 2 * len(recorder.names())
    for name, bounds in recorder.reads:
        assert np.prod([stop - start for start, stop in bounds]) * 2 == np.prod(recorder.shape(name))


def test_experts_are_read_where_they_live(tmp_path):
    """No host memory holds more than a shard's own experts, and no tensor is read by two shards."""
    config = model_config(VARIANTS["qwen3_moe"])
    checkpoint = tiny.save(tmp_path, VARIANTS["qwen3_moe"], tiny.tensors(config))
    recorder = Recorder(TensorSource(checkpoint.directory))
    abstract = tiny.tree(config, place=_cut_where_it_divides(_mesh_of((2, 4)), 0))
    arrays = loader.load_from(recorder, abstract, TABLES["qwen3_moe"], tied=False)
    assert len(recorder.reads) == len(set(recorder.reads))
    of_experts = [name for name, _ in recorder.reads if ".experts." in name]
    assert (
        len(of_experts) == len(set(of_experts)) == tiny.L * 3 * 4
    )  # each whole, by the one shard it lives on
    assert arrays["layers_0"]["ffn"]["experts"]["up"].addressable_shards[0].data.shape[0] == 1


def test_an_expert_that_is_missing_or_too_many(tmp_path):
    contents = tiny.tensors(model_config(VARIANTS["qwen3_moe"]))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    missing = {k: v for k, v in contents.items() if k != name}
    with pytest.raises(UserError, match=rf"lacks 1 tensors: {name}"):
        _load(tiny.save(tmp_path / "a", VARIANTS["qwen3_moe"], missing))
    more = contents | {name.replace(".3.", ".4."): contents[name]}
    with pytest.raises(
        UserError, match=r"no place for 1 tensors: model\.layers\.1\.mlp\.experts\.4\.up_proj"
    ):
        _load(tiny.save(tmp_path / "b", VARIANTS["qwen3_moe"], more))
    wrong = contents | {name: contents[name][:-1]}
    with pytest.raises(UserError, match=r"experts\.3\.up_proj.weight' has shape \(23, 32\); .*\(24, 32\)"):
        _load(tiny.save(tmp_path / "c", VARIANTS["qwen3_moe"], wrong))


@pytest.mark.parametrize("name", ["llama", "olmoe"])
def test_large_slices_are_read_in_bounded_blocks(tmp_path, monkeypatch, name):
    for limit in ("READ_BYTES", "TRANSPOSE_BYTES"):
        monkeypatch.setattr(loader, limit, 7 * tiny.D * 4)  # 7 rows: does not divide anything
    config = model_config(VARIANTS[name])
    contents = tiny.tensors(config)
    recorder = Recorder(TensorSource(tiny.save(tmp_path, VARIANTS[name], contents).directory))
    abstract = tiny.tree(config)
    loaded = loader.load_from(recorder, abstract, TABLES[config.family], tied=False)
    tiny.assert_same(loaded, tiny.expected(contents, config))
    sizes = [np.prod([stop - start for start, stop in bounds]) * 4 for _, bounds in recorder.reads]
    assert max(sizes) <= loader.READ_BYTES


def _load(checkpoint: Checkpoint, config=None):
    config = config or checkpoint.config
    return load_params(checkpoint, tiny.tree(config), progress=False)


def test_missing_tensors_are_listed(tmp_path):
    contents = tiny.tensors(model_config(VARIANTS["llama"]))
    del contents["model.layers.1.mlp.up_proj.weight"], contents["model.norm.weight"]
    with pytest.raises(
        UserError, match=r"lacks 2 tensors: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm"
    ):
        _load(tiny.save(tmp_path, VARIANTS["llama"], contents))


def test_unread_tensors_are_listed_sorted_and_cut_at_ten(tmp_path):
    contents = tiny.tensors(model_config(VARIANTS["llama"]))
    contents |= {f"extra.{i:02d}": np.zeros(2, np.float32) for i in reversed(range(12))}
    with pytest.raises(UserError, match=r"no place for 12 tensors: extra\.00, .*extra\.09, \.\.\."):
        _load(tiny.save(tmp_path, VARIANTS["llama"], contents))


def test_a_bias_that_the_config_does_not_name_is_not_passed_over(tmp_path):
    contents = tiny.tensors(model_config(VARIANTS["llama with biases"]))
    with pytest.raises(UserError, match="no place for 14 tensors"):
        _load(tiny.save(tmp_path, VARIANTS["llama"], contents))


def test_rotary_frequencies_are_skipped(tmp_path):
    config = model_config(VARIANTS["llama"])
    contents = tiny.tensors(config)
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    loaded = _load(tiny.save(tmp_path, VARIANTS["llama"], contents | extra))
    tiny.assert_same(loaded, tiny.expected(contents, config))


def test_untied_without_head_is_an_error(tmp_path):
    contents = tiny.tensors(model_config(VARIANTS["llama"]))
    del contents["lm_head.weight"]
    with pytest.raises(UserError, match=r"lacks 1 tensors: lm_head\.weight; .*tie_word_embeddings=false"):
        _load(tiny.save(tmp_path, VARIANTS["llama"], contents))


def test_tied_with_an_identical_head_is_fine(tmp_path):
    config = model_config(VARIANTS["llama tied"])
    contents = tiny.tensors(config)
    stored = contents | {"lm_head.weight": contents["model.embed_tokens.weight"].copy()}
    tiny.assert_same(
        _load(tiny.save(tmp_path, VARIANTS["llama tied"], stored)), tiny.expected(contents, config)
    )


def test_tied_with_another_head_is_an_error(tmp_path):
    contents = tiny.tensors(model_config(VARIANTS["llama tied"]))
    contents["lm_head.weight"] = contents["model.embed_tokens.weight"] + 1
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        _load(tiny.save(tmp_path, VARIANTS["llama tied"], contents))


def test_another_shape_is_an_error(tmp_path):
    contents = tiny.tensors(model_config(VARIANTS["llama"]))
    contents["model.embed_tokens.weight"] = np.zeros((tiny.V + 8, tiny.D), np.float32)
    with pytest.raises(
        UserError, match=r"'model\.embed_tokens\.weight' has shape \(72, 32\).*asks for \(64, 32\)"
    ):
        _load(tiny.save(tmp_path, VARIANTS["llama"], contents))


def test_a_parameter_without_a_tensor_is_an_error(tmp_path):
    checkpoint = tiny.save(tmp_path, VARIANTS["mistral"], tiny.tensors(model_config(VARIANTS["mistral"])))
    with pytest.raises(
        UserError, match=r"no tensor is known for 4 parameters: layers_0/attention/key_norm/scale"
    ):
        _load(checkpoint, model_config(VARIANTS["qwen3"]))
