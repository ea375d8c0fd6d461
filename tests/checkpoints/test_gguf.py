"""GGUF files: round trips through our conversion, agreement with transformers' loader, and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from sv_jax.checkpoints import gguf_file, load_params, resolve
from sv_jax.checkpoints.gguf_config import llama3_divisors
from sv_jax.checkpoints.hf_config import model_config
from sv_jax.config import RopeScaling, UserError
from tests.checkpoints import tiny, tiny_gguf

VOCAB = len(tiny_gguf.vocabulary())
FAMILIES = ("llama", "qwen2", "qwen3")


def _config(family: str, **changes):
    return model_config(tiny.config_dict(family, vocab_size=VOCAB, **changes))


def _resolve(path, tmp_path, dtype="float32"):
    return resolve(str(path), dtype=dtype, cache_directory=tmp_path / "cache", progress=False)


def _load(checkpoint, **options):
    return load_params(checkpoint, tiny.tree(checkpoint.config, **options), progress=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(tmp_path, family, tied):
    config = _config(family, tie_word_embeddings=tied)
    contents = tiny.tensors(config)
    checkpoint = _resolve(tiny_gguf.write(tmp_path / "m.gguf", config, contents), tmp_path)
    assert checkpoint.config == config
    assert checkpoint.eos_token_ids == (2, 0)  # the metadata's own first, then <|endoftext|>
    tiny.assert_same(_load(checkpoint), tiny.expected(contents, config))


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.BF16]
)
def test_quantised_round_trip(tmp_path, kind):
    config = _config("llama", num_attention_heads=4, head_dim=8, intermediate_size=64)
    contents = tiny.tensors(config)
    path = tiny_gguf.write(tmp_path / "m.gguf", config, contents, quantised=kind)
    through = {
        name: quants.dequantize(quants.quantize(value, kind), kind) if value.ndim == 2 else value
        for name, value in contents.items()
    }
    tiny.assert_same(_load(_resolve(path, tmp_path)), tiny.expected(through, config))


def test_bfloat16_is_half_the_size_and_rounded(tmp_path):
    import ml_dtypes

    config = _config("llama")
    contents = tiny.tensors(config)
    path = tiny_gguf.write(tmp_path / "m.gguf", config, contents)
    checkpoint = _resolve(path, tmp_path, "bfloat16")
    rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in contents.items()}
    tiny.assert_same(_load(checkpoint, dtype=ml_dtypes.bfloat16), tiny.expected(rounded, config))
    size = (checkpoint.directory / "model.safetensors").stat().st_size
    assert size < 0.6 * (_resolve(path, tmp_path).directory / "model.safetensors").stat().st_size


def test_biases_are_permuted_like_their_weights(tmp_path):
    config = _config("llama", attention_bias=True, mlp_bias=True)
    contents = tiny.tensors(config)
    checkpoint = _resolve(tiny_gguf.write(tmp_path / "m.gguf", config, contents), tmp_path)
    assert checkpoint.config == config
    tiny.assert_same(_load(checkpoint), tiny.expected(contents, config))


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_same_numbers(tmp_path, family):
    for package in ("torch", "accelerate"):  # transformers reads GGUF files with both only
        pytest.importorskip(package)
    transformers = pytest.importorskip("transformers")
    # Their reader of qwen3 takes head_dim to be 128, whatever the file says.
    config = _config(family, head_dim=128 if family == "qwen3" else tiny.HD)
    tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").state_dict()
    numbers = {name: value.float().numpy() for name, value in theirs.items()}
    tiny.assert_same(_load(_resolve(tmp_path / "m.gguf", tmp_path)), tiny.expected(numbers, config))


def test_blocks_bound_memory_and_keep_the_order(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "BLOCK_BYTES", 5 * tiny.D * 4)  # 5 rows at a time
    config = _config("llama")
    contents = tiny.tensors(config)
    path = tiny_gguf.write(tmp_path / "m.gguf", config, contents)
    file = gguf_file.GgufFile(path)
    assert max(len(block) for block in file.blocks("blk.0.attn_q.weight")) == 5
    tiny.assert_same(_load(_resolve(path, tmp_path)), tiny.expected(contents, config))


@pytest.mark.parametrize("same", [True, False])
def test_an_embedding_stored_twice_is_tied(tmp_path, same):
    config = _config("qwen2", tie_word_embeddings=same)
    contents = tiny.tensors(config)
    exact = contents["model.embed_tokens.weight"]
    if same:  # two quantisations of one matrix, the head's being the finer, as published files have them
        rough = quants.quantize(exact, GGMLQuantizationType.Q4_1)
        stored = contents | {"model.embed_tokens.weight": quants.dequantize(rough, GGMLQuantizationType.Q4_1)}
        stored["lm_head.weight"] = exact
    else:
        stored = contents
    checkpoint = _resolve(tiny_gguf.write(tmp_path / "m.gguf", config, stored), tmp_path)
    assert checkpoint.config.tie_word_embeddings is same
    tiny.assert_same(_load(checkpoint), tiny.expected(contents, config))


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_frequencies_are_recovered(tmp_path):
    config = _config("llama", head_dim=64, num_attention_heads=4, rope_theta=500_000.0)
    factors = llama3_divisors(500_000.0, 64, LLAMA3).astype(np.float32)
    extra = {"rope_freqs.weight": factors}
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config), extra=extra)
    assert _resolve(path, tmp_path).config.rope_scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)


@pytest.mark.parity
def test_llama3_divisors_are_those_of_transformers():
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", **LLAMA3}
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=8, rope_parameters={**scaling, "rope_theta": 5e5}
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** -(np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(plain / llama3_divisors(5e5, 64, scaling), frequencies.numpy(), rtol=1e-5)


def test_other_frequencies_are_refused(tmp_path):
    config = _config("llama")
    extra = {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config), extra=extra)
    with pytest.raises(
        UserError, match=r"rope_freqs\.weight holds frequencies that are not Llama 3's; allowed"
    ):
        _resolve(path, tmp_path)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"scaling.type": "none"}, None),
        ({"scaling.type": "linear", "scaling.factor": 2.0}, RopeScaling("linear", 2.0)),
        ({"scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32},
            RopeScaling("yarn", 4.0, 32),
        ),
    ],
)
def test_rope_scaling_of_the_metadata(tmp_path, metadata, expected):
    config = _config("qwen2")
    keys = {f"qwen2.rope.{key}": value for key, value in metadata.items()}
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config), metadata=keys)
    assert _resolve(path, tmp_path).config.rope_scaling == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"llama.rope.scaling.type": "longrope"},
            "rope scaling 'longrope' is not supported; allowed: none, linear",
        ),
        ({"llama.expert_count": 8}, r"llama\.expert_count=8 is not supported; allowed: dense models"),
        ({"split.count": 3}, r"split\.count=3"),
        ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count=4 is not supported; allowed: .* 8"),
        ({"llama.rope.scaling.attn_factor": 2.0}, r"attn_factor is not supported"),
    ],
)
def test_metadata_that_cannot_be_expressed(tmp_path, metadata, message):
    config = _config("llama")
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config), metadata=metadata)
    with pytest.raises(UserError, match=message):
        _resolve(path, tmp_path)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_unknown_architecture(tmp_path):
    config = _config("llama")
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config), architecture="gemma2")
    with pytest.raises(
        UserError, match="architecture 'gemma2' is not supported; allowed: llama, qwen2, qwen3"
    ):
        _resolve(path, tmp_path)


def test_integer_tensors_are_named(tmp_path):
    config = _config("llama")
    extra = {"blk.0.attn_q.scales": np.ones((4, 4), np.int8)}
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config), extra=extra)
    with pytest.raises(
        UserError,
        match=r"attn_q\.scales' has type I8, which is not supported; allowed: BF16, F16, F32, .*Q4_K",
    ):
        _resolve(path, tmp_path)


def test_tensors_without_a_place_are_named(tmp_path):
    config = _config("llama")
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config), extra=extra)
    with pytest.raises(
        UserError, match=r"1 tensors without a place in the model: blk\.0\.attn_sinks\.weight"
    ):
        _resolve(path, tmp_path)


def test_missing_tensors_are_found_by_the_loader(tmp_path):
    config = _config("qwen2")
    contents = tiny.tensors(config)
    del contents["model.layers.1.self_attn.k_proj.bias"]
    checkpoint = _resolve(tiny_gguf.write(tmp_path / "m.gguf", config, contents), tmp_path)
    with pytest.raises(UserError, match=r"lacks 1 tensors: model\.layers\.1\.self_attn\.k_proj\.bias"):
        _load(checkpoint)


@pytest.mark.parametrize("keep", [0, 3, 100, 2000, -1000])
def test_truncated_files(tmp_path, keep):
    config = _config("llama")
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"m\.gguf is truncated or not a GGUF file"):
        _resolve(path, tmp_path)


@pytest.mark.parametrize(
    ("drop", "metadata", "message"),
    [
        (("model",), {"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported; allowed: gpt2"),
        (
            ("pre",),
            {"tokenizer.ggml.pre": "tekken"},
            "pre-tokenizer 'tekken' is not supported; allowed: smollm, gpt-2",
        ),
        (("pre",), {}, "pre-tokenizer None is not supported"),
    ],
)
def test_unknown_tokenizers(tmp_path, drop, metadata, message):
    config = _config("llama")
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config), drop=drop, metadata=metadata)
    with pytest.raises(UserError, match=message):
        _resolve(path, tmp_path)


def test_no_end_token(tmp_path):
    config = _config("llama")
    path = tiny_gguf.write(
        tmp_path / "m.gguf", config, tiny.tensors(config), drop=("eos", "token_type", "chat_template")
    )
    checkpoint = _resolve(path, tmp_path)
    assert checkpoint.eos_token_ids == ()
    assert not checkpoint.tokenizer().has_chat_template


def test_tokenizer_of_a_gguf(tmp_path):
    config = _config("llama")
    tokenizer = _resolve(
        tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config)), tmp_path
    ).tokenizer()
    vocab = tiny_gguf.vocabulary()
    ids = tokenizer.encode("hello w<|im_end|>")
    assert [vocab[i] for i in ids] == ["hello", "Ġw", "<|im_end|>"]
    assert tokenizer.decode(ids) == "hello w"
    assert tokenizer.decode([*ids, VOCAB - 1, VOCAB + 5], skip_special_tokens=False) == "hello w<|im_end|>"
    assert tokenizer.vocab_size == vocab.index("[PAD264]")


def test_sentencepiece_bos_and_spaces(tmp_path):
    """The vocabulary kind of Llama 2: spaces become ▁, unknown characters become bytes."""
    from sv_jax.checkpoints.gguf_tokenizer import build

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer, config = build(metadata)
    assert config["add_bos_token"] is True  # llama.cpp's default for this kind
    assert tokenizer.encode("hi hi").tokens == ["<s>", "▁hi", "▁hi"]
    assert tokenizer.encode("hié").tokens == ["<s>", "▁hi", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hi é hi").ids) == "hi é hi"
    off, _ = build(
        metadata | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    )
    assert off.encode("hi").tokens == ["h", "i"]


@pytest.mark.parity
def test_merges_follow_from_scores_as_in_transformers():
    base = pytest.importorskip("transformers.tokenization_utils_base")
    if not hasattr(base, "generate_merges"):
        pytest.skip("this version of transformers has its merge extractor elsewhere")
    from sv_jax.checkpoints.gguf_tokenizer import merges_from_scores

    rng = np.random.default_rng(0)
    pieces = list(dict.fromkeys("".join(rng.choice(list("abc"), rng.integers(1, 6))) for _ in range(300)))
    vocab = {piece: index for index, piece in enumerate(pieces)}
    scores = {piece: -float(index // 3) for piece, index in vocab.items()}  # with ties
    assert merges_from_scores(vocab, scores) == base.generate_merges(vocab, scores)


def test_converted_config_is_plain_json(tmp_path):
    config = _config("llama")
    checkpoint = _resolve(tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config)), tmp_path)
    written = json.loads((checkpoint.directory / "config.json").read_text())
    assert written["rms_norm_eps"] == 1e-5 and written["architectures"] == ["LlamaForCausalLM"]
