"""A model that is cut from another one: the file of the cut, the directory that it gives, what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.checkpoints import cache as caches
from sv_jax.checkpoints import load_params, moe_cut, resolve, wheels
from sv_jax.checkpoints.hf_config import model_config
from sv_jax.checkpoints.moe_cut import MoECut, config_dict, load_cut, save_cut
from sv_jax.checkpoints.registry import DATA, DERIVED, REGISTRY, Derived, Entry
from sv_jax.config import UserError
from sv_jax.evaluation.expert_cut import labels_of
from sv_jax.evaluation.expert_cut_model import Masks, ffn_inputs, masked_surprise, surprise
from sv_jax.model.transformer import Transformer, abstract_params
from sv_jax.sharding import make_sharding
from tests.checkpoints import tiny, tiny_gguf
from tests.parity.reference import load, reference_logits, whole_logits

REAL = "smollm2-135m-moe"
CONFIG = model_config(tiny.config_dict("llama", vocab_size=len(tiny_gguf.vocabulary())))
SHARED, EXPERTS = 16, 4  # of 48 channels: 8 an expert
TOKENS = np.random.default_rng(1).integers(3, 250, 16).astype(np.int32)


def make_cut(sha256: str = "ab" * 32, **changes) -> MoECut:
    """Of the second of two layers."""
    rng = np.random.default_rng(2)
    fields = {
        "layers": (1,),
        "channels": rng.permutation(tiny.F)[None],
        "router": rng.standard_normal((1, EXPERTS, tiny.D)).astype(np.float16).astype(np.float32),
        "router_scale": 1e-3,
        "num_shared": SHARED,
        "experts_per_token": 2,
        "base": "tiny",
        "base_sha256": sha256,
        "provenance": {"made_by": "a test"},
    }
    return MoECut(**{**fields, **changes})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with the weights of a registry's `tiny`, from which `tiny-moe` is cut."""
    monkeypatch.setattr(wheels, "_download", None)
    gguf = tiny_gguf.write(tmp_path / "tiny.gguf", CONFIG, tiny.tensors(CONFIG))
    sha256 = wheels.file_sha256(gguf)
    entry = Entry(("nowhere==1",), ".gguf", sha256, gguf.stat().st_size, "Tiny")
    monkeypatch.setitem(REGISTRY, "tiny", entry)
    cache = tmp_path / "cache"
    (cache / "gguf").mkdir(parents=True)
    gguf.rename(wheels.gguf_path("tiny", entry, cache))
    save_cut(tmp_path / "cut.safetensors", make_cut(sha256))
    monkeypatch.setitem(DERIVED, "tiny-moe", Derived("tiny", tmp_path / "cut.safetensors", "Tiny, cut"))
    return cache


def load_with(checkpoint, experts_per_token: int | None = None, dtype: str = "float32"):
    config = checkpoint.config
    if experts_per_token is not None:
        moe = dataclasses.replace(config.moe, num_experts_per_tok=experts_per_token)
        config = dataclasses.replace(config, moe=moe)
    target = Transformer(config, dtype, make_sharding(config))
    return target, load_params(checkpoint, abstract_params(target), progress=False)


def without_routers(params):
    """With every router a map to zeros."""
    return {
        name: {**layer, "ffn": {**layer["ffn"], "router": {"kernel": layer["ffn"]["router"]["kernel"] * 0}}}
        if "router" in layer.get("ffn", {})
        else layer
        for name, layer in params.items()
    }


def test_a_cut_comes_back_from_its_file(tmp_path):
    cut = make_cut()
    save_cut(tmp_path / "cut.safetensors", cut)
    save_cut(tmp_path / "again.safetensors", cut)
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "cut.safetensors").read_bytes()
    back = load_cut(tmp_path / "cut.safetensors")
    for field in dataclasses.fields(MoECut):
        np.testing.assert_array_equal(getattr(back, field.name), getattr(cut, field.name))
    shared, experts = back.experts_of(1)
    assert shared.shape == (SHARED,) and experts.shape == (EXPERTS, back.expert_size) == (EXPERTS, 8)
    np.testing.assert_array_equal(np.concatenate([shared, *experts]), cut.channels[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": np.zeros((1, tiny.F), int)}, "the channels of a layer are no permutation"),
        ({"num_shared": 15}, "33 channels for 4 experts"),
        ({"layers": (0, 1)}, "2 layers, channels of 1, routers of 1"),
    ],
)
def test_a_cut_that_is_none(changes, message):
    with pytest.raises(ValueError, match=message):
        make_cut(**changes)


def test_another_file_is_no_cut(tmp_path):
    tiny.save(tmp_path, tiny.config_dict("llama"), {"x": np.zeros(3, np.float32)})
    for name in ("model.safetensors", "config.json", "nothing"):
        with pytest.raises(UserError, match=f"{name} is not the cut of a model"):
            load_cut(tmp_path / name)


def test_the_config_keeps_all_but_the_networks():
    base = tiny.config_dict("llama", rope_theta=5e4, tie_word_embeddings=True, eos_token_id=7)
    derived = config_dict({**base, "attention_bias": False}, make_cut())
    assert derived["eos_token_id"] == 7 and "attention_bias" not in derived
    ours, dense = model_config(derived), model_config(base)
    assert ours.moe.num_experts == EXPERTS and ours.moe.num_experts_per_tok == 2
    assert ours.moe.expert_size == 8 and ours.moe.shared_expert_size == SHARED
    assert not ours.moe.norm_topk_prob and ours.dense_ffn_layers == (0,)
    same = dataclasses.replace(ours, family="llama", moe=None, dense_ffn_layers=())
    assert same == dense


@pytest.mark.parametrize("wrong", [{"model_type": "qwen2"}, {"attention_bias": True}, {"mlp_bias": True}])
def test_only_a_llama_without_biases_is_cut(wrong):
    with pytest.raises(UserError, match="cannot be cut; allowed: a llama without biases"):
        config_dict({**tiny.config_dict("llama"), **wrong}, make_cut())


def test_a_name_is_cut_once(cache, monkeypatch):
    first = resolve("tiny-moe", cache_directory=cache, progress=False)
    assert first.provenance.startswith(
        "tiny-moe, cut by sv_jax from tiny, dequantised from the published GGUF"
    )
    assert first.sha256 == wheels.file_sha256(DERIVED["tiny-moe"].cut)
    base = resolve("tiny", cache_directory=cache)
    assert first.eos_token_ids == base.eos_token_ids
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (first.directory / name).read_bytes() == (base.directory / name).read_bytes()
    monkeypatch.setattr(moe_cut, "derive", None)
    assert resolve("tiny-moe", cache_directory=cache) == first
    assert not list(cache.glob(f"{caches.PARTIAL_PREFIX}*"))


def test_a_failed_cut_leaves_nothing(cache, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    resolve("tiny", cache_directory=cache, progress=False)
    monkeypatch.setattr(moe_cut, "write_shards", fail)
    with pytest.raises(UserError, match="disk full while writing to"):
        resolve("tiny-moe", cache_directory=cache, progress=False)
    assert not list((cache / "converted").glob("tiny-moe*"))
    assert not list(cache.glob(f"{caches.PARTIAL_PREFIX}*"))


def test_other_weights_are_not_cut(cache):
    save_cut(DERIVED["tiny-moe"].cut, make_cut("cd" * 32))
    with pytest.raises(UserError, match=r"the weights of tiny have sha256 \w+; the cut is of (cd){32} alone"):
        resolve("tiny-moe", cache_directory=cache, progress=False)
    assert not list((cache / "converted").glob("tiny-moe*"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_all_experts_and_no_router_it_is_the_dense_model(cache, dtype):
    """No weight is rounded by the cut: the factors are powers of two."""
    dense = load_with(resolve("tiny", dtype=dtype, cache_directory=cache, progress=False))
    target, params = load_with(
        resolve("tiny-moe", dtype=dtype, cache_directory=cache, progress=False), EXPERTS
    )
    logits = whole_logits(target, without_routers(params), TOKENS)
    np.testing.assert_allclose(logits, whole_logits(*dense, TOKENS), atol=1e-3)


def test_masked_channels_are_what_the_cut_model_leaves_out(cache):
    """Layers are ranked with the dense model under masks, before there is a cut one."""
    target, params = load_with(resolve("tiny-moe", cache_directory=cache, progress=False))
    dense, dense_params = load_with(resolve("tiny", cache_directory=cache, progress=False))
    cut, tokens = load_cut(DERIVED["tiny-moe"].cut), jnp.array(TOKENS[None])
    labels = np.tile(labels_of(cut.channels[0], SHARED, EXPERTS), (2, 1))
    router = np.tile(cut.router, (2, 1, 1))
    ours = masked_surprise(dense, dense_params, tokens, Masks(router, labels, jnp.array([EXPERTS, 2])))
    np.testing.assert_allclose(ours, surprise(target, params, tokens), rtol=2e-3)
    whole = masked_surprise(dense, dense_params, tokens, Masks(router, labels, jnp.array([EXPERTS, EXPERTS])))
    np.testing.assert_allclose(whole, surprise(dense, dense_params, tokens), rtol=1e-6)
    assert abs(float(ours[0] - whole[0])) > 0.1


def test_inputs_of_the_networks_are_normed(cache):
    dense, params = load_with(resolve("tiny", cache_directory=cache, progress=False))
    inputs = ffn_inputs(dense, params, jnp.array(TOKENS[None]))
    assert inputs.shape == (2, 1, len(TOKENS), tiny.D) and inputs.dtype == jnp.float16
    scale = np.asarray(params["layers_1"]["ffn_norm"]["scale"])
    np.testing.assert_allclose(np.square(inputs[1] / scale).mean(-1), 1.0, rtol=1e-2)


def test_the_shipped_file_is_small_and_of_the_published_weights():
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 4e6
    cut = load_cut(DERIVED[REAL].cut)
    assert cut.base == DERIVED[REAL].base and cut.base_sha256 == REGISTRY[cut.base].sha256
    assert cut.channels.shape == (10, 1536) and cut.num_experts == cut.expert_size == 32
    assert 0 not in cut.layers


@pytest.mark.real
def test_the_real_model_with_all_experts_and_no_router_is_dense():
    checkpoint, base = resolve(REAL, progress=False), resolve(DERIVED[REAL].base, progress=False)
    tokens = np.array(
        base.tokenizer().encode("The lighthouse was built in 1871, after two ships\n"), np.int32
    )
    dense = whole_logits(*load(base.directory), tokens)
    target, params = load_with(checkpoint, 32)
    np.testing.assert_allclose(whole_logits(target, without_routers(params), tokens), dense, atol=1e-3)
    # The router weighs experts as well, but hardly: it is there to choose. (The logits of a text's very first
    # token are far off even so; docs/moe.md.)
    assert np.abs(whole_logits(target, params, tokens) - dense)[1:].mean() < 0.5


@pytest.mark.real
@pytest.mark.parity
def test_transformers_reads_the_real_model_alike():
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint = resolve(REAL, progress=False)
    model = transformers.Qwen2MoeForCausalLM.from_pretrained(checkpoint.directory, dtype="float32").eval()
    tokens = np.array(checkpoint.tokenizer().encode("def mean(values):\n    return sum(values)"), np.int32)
    expected = reference_logits(model, tokens)
    del model
    target, params = load_with(checkpoint)
    np.testing.assert_allclose(whole_logits(target, params, tokens), expected, atol=1e-3)


@pytest.mark.real
def test_the_real_model_says_what_it_is():
    checkpoint = resolve(REAL, progress=False)
    assert checkpoint.provenance == (
        "smollm2-135m-moe, cut by sv_jax from smollm2-135m, "
        "dequantised from the published GGUF (sha256 b179…)"
    )
    assert json.loads((checkpoint.directory / "config.json").read_text())["num_experts_per_tok"] == 20
