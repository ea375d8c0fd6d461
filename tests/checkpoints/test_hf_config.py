"""config.json: transformers' defaults, both spellings of rope, sliding windows, and refusals."""

from __future__ import annotations

import json

import pytest

from sv_jax.checkpoints.hf_config import model_config, read_config
from sv_jax.config import FAMILIES, MoEConfig, RopeScaling, UserError
from tests.checkpoints import tiny

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _bare(family: str, **changes):
    """Only what no family has a default for, so that the defaults show."""
    sizes = {"vocab_size": 64, "hidden_size": 4096, "intermediate_size": 48}
    return {"model_type": family, **sizes, "num_hidden_layers": 2, "num_attention_heads": 32, **changes}


DEFAULT_MOE = {
    "mixtral": MoEConfig(8, 2, 48, norm_topk_prob=True),
    "qwen2_moe": MoEConfig(60, 4, 1408, norm_topk_prob=False, shared_expert_size=5632),
    "qwen3_moe": MoEConfig(128, 8, 768, norm_topk_prob=False),
    "olmoe": MoEConfig(64, 8, 48, norm_topk_prob=False),
}


@pytest.mark.parametrize(
    ("family", "kv_heads", "head_dim", "positions"),
    [
        ("llama", 32, 128, 2048),
        ("mistral", 8, 128, 131_072),
        ("qwen2", 32, 128, 32_768),
        ("qwen3", 32, 128, 32_768),
        ("mixtral", 8, 128, 131_072),
        ("qwen2_moe", 16, 128, 32_768),
        ("qwen3_moe", 4, 128, 32_768),
        ("olmoe", 32, 128, 4096),
    ],
)
def test_defaults(family, kv_heads, head_dim, positions):
    config = model_config(_bare(family))
    assert (config.num_kv_heads, config.head_dim) == (kv_heads, head_dim)
    assert config.max_position_embeddings == positions
    epsilon, theta = (1e-5 if family in ("mixtral", "olmoe") else 1e-6), (1e6 if family == "mixtral" else 1e4)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (epsilon, theta, None)
    assert not config.tie_word_embeddings
    assert config.qk_norm == {"qwen3": "head", "qwen3_moe": "head", "olmoe": "projection"}.get(family)
    assert config.attention_bias == (family in ("qwen2", "qwen2_moe"))
    assert config.moe == DEFAULT_MOE.get(family) and config.dense_ffn_layers == ()
    assert config.sliding_windows == ((4096, 4096) if family == "mistral" else ())


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**_bare(family))
    ours = model_config(_bare(family))
    assert ours.num_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    if ours.moe is not None:
        assert ours.moe.num_experts == theirs.num_experts
        assert ours.moe.num_experts_per_tok == theirs.num_experts_per_tok
        assert ours.moe.norm_topk_prob == getattr(theirs, "norm_topk_prob", True)
        assert ours.moe.expert_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.moe.shared_expert_size == getattr(theirs, "shared_expert_intermediate_size", 0)
    rope = getattr(theirs, "rope_parameters", None) or {"rope_theta": theirs.rope_theta}
    assert ours.rope_theta == rope["rope_theta"]
    # What it writes must mean the same to us as the bare dictionary.
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path) == ours


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32_768}
SCALINGS = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 2.0}, RopeScaling(kind="linear", factor=2.0)),
    ({"rope_type": "llama3", **LLAMA3}, RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)),
    ({"rope_type": "yarn", **YARN}, RopeScaling("yarn", 4.0, 32_768)),
    (
        {"rope_type": "yarn", **YARN, "beta_fast": 16, "attention_factor": 1.5, "truncate": False},
        RopeScaling("yarn", 4.0, 32_768, beta_fast=16.0, attention_factor=1.5, truncate=False),
    ),
    ({"rope_type": "yarn", "factor": 4.0}, RopeScaling("yarn", 4.0, 128)),  # max_position_embeddings
]


@pytest.mark.parametrize(("scaling", "expected"), SCALINGS)
def test_rope_in_both_spellings(scaling, expected):
    old = tiny.config_dict("llama", rope_theta=5e5, rope_scaling=scaling)
    oldest = dict(scaling)
    oldest["type"] = oldest.pop("rope_type")
    new = tiny.config_dict("llama", rope_parameters={**scaling, "rope_theta": 5e5})
    for config in (old, tiny.config_dict("llama", rope_theta=5e5, rope_scaling=oldest), new):
        assert model_config(config).rope_scaling == expected
        assert model_config(config).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ()),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}, (None, 16)),
        ({"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16}, ()),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, ()),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (16, None),
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows(family, changes, expected):
    assert model_config(tiny.config_dict(family, **changes)).sliding_windows == expected


@pytest.mark.parametrize(("window", "expected"), [(16, (16, 16)), (None, ())])
def test_mistral_windows(window, expected):
    assert model_config(tiny.config_dict("mistral", sliding_window=window)).sliding_windows == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma2"},
            "model_type 'gemma2' is not supported; allowed: llama, mistral, qwen2, qwen3",
        ),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; allowed: silu"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic' is not supported; allowed: default, linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' of config.json lacks low_freq_factor, high",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' of config.json lacks factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq' is not supported"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0; a positive integer is required"),
        ({"num_key_value_heads": 3}, "is not a multiple of"),
        ({"head_dim": None, "hidden_size": 30}, "hidden_size=30 is not a multiple of num_attention_heads=4"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(UserError, match=message):
        model_config(tiny.config_dict("llama", **changes))


def test_unknown_layer_type():
    changes = {"use_sliding_window": True, "layer_types": ["chunked_attention", "full_attention"]}
    with pytest.raises(UserError, match="layer type 'chunked_attention' is not supported"):
        model_config(tiny.config_dict("qwen3", **changes))


@pytest.mark.parametrize("key", REQUIRED)
def test_required_keys(key):
    config = _bare("llama")
    del config[key]
    with pytest.raises(UserError, match=f"{key}=None; a positive integer is required"):
        model_config(config)


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = tiny.config_dict("llama", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).family == "llama"
    assert not marker.exists()


def test_model_type_may_follow_from_architectures():
    config = tiny.config_dict("llama", architectures=["Qwen2ForCausalLM"])
    del config["model_type"]
    assert model_config(config).family == "qwen2"


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[1]", "holds a list")])
def test_broken_json(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_no_config(tmp_path):
    with pytest.raises(UserError, match=r"lacks config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_layers_without_experts(family):
    def dense(**changes):
        return model_config(_bare(family, num_hidden_layers=6) | changes).dense_ffn_layers

    assert dense(mlp_only_layers=[4, 0]) == (0, 4) and dense(mlp_only_layers=None) == ()
    assert dense(decoder_sparse_step=3) == (0, 1, 3, 4)  # layers 2 and 5 have experts
    assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) == (0, 1, 2, 4)
    with pytest.raises(UserError, match="decoder_sparse_step=0 is not allowed; allowed: 1 or more"):
        dense(decoder_sparse_step=0)


def test_windows_of_moe_families():
    def windows(family, **changes):
        sizes = {"num_hidden_layers": 4, "sliding_window": 16}
        return model_config(_bare(family) | sizes | changes).sliding_windows

    assert windows("mixtral") == (16,) * 4 and windows("olmoe") == ()
    assert windows("qwen3_moe") == windows("qwen2_moe") == ()
    assert windows("qwen3_moe", use_sliding_window=True) == (16,) * 4
    assert windows("qwen2_moe", use_sliding_window=True, max_window_layers=3) == (16, None, 16, None)


def test_what_a_moe_config_may_not_say():
    with pytest.raises(
        UserError, match="num_experts_per_tok=9 is not allowed; allowed: 1 to the number of e"
    ):
        model_config(_bare("mixtral", num_experts_per_tok=9))
    with pytest.raises(UserError, match=r"clip_qkv=8\.0 is not supported; allowed: null"):
        model_config(_bare("olmoe", clip_qkv=8.0))
    with pytest.raises(UserError, match="moe_intermediate_size=0; a positive integer is required"):
        model_config(_bare("qwen3_moe", moe_intermediate_size=0))
