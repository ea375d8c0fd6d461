"""Logits of tiny random models that transformers built and saved, at every position."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.parity.reference import (
    VOCAB,
    load,
    random_model,
    reference_logits,
    stepped_logits,
    whole_logits,
)

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

VARIANTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 scaling": ("llama", {"rope_parameters": LLAMA3}),
    "linear scaling": ("llama", {"rope_parameters": LINEAR}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "mistral past its window": ("mistral", {"sliding_window": 40}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral past its window": ("mixtral", {"num_local_experts": 5, "sliding_window": 40}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen2_moe, weights normalised, a layer without experts, no biases": (
        "qwen2_moe",
        {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0], "qkv_bias": False},
    ),
    "qwen2_moe with a window in some layers": (
        "qwen2_moe",
        {**EXPERTS, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe, weights as they are, experts in every other layer": (
        "qwen3_moe",
        {**EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
    "qwen3_moe in a window": ("qwen3_moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 24}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 12}),
    "olmoe, weights normalised": ("olmoe", {"num_experts": 8, "norm_topk_prob": True, "head_dim": 12}),
}


def tokens_of(count):
    return np.random.default_rng(0).integers(0, VOCAB, count).astype(np.int32)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits(name, tmp_path, record_property):
    family, changes = VARIANTS[name]
    model = random_model(family, **changes)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(200)
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.5  # or the tolerance says little
    target, params = load(tmp_path)
    stepped, first = stepped_logits(target, params, tokens, chunk=64)
    difference = max(
        np.abs(whole_logits(target, params, tokens) - expected).max(), np.abs(stepped - expected).max()
    )
    record_property("max_logit_difference", float(difference))
    print(f"{name}: max logit difference {difference:.1e}, standard deviation {expected.std():.1f}")
    assert difference <= TOLERANCE
    assert first == expected[-1].argmax()

    # The feature that the variant is about is visible at these positions.
    without = dataclasses.replace(target.config, rope_scaling=None, sliding_windows=())
    if without != target.config:
        plain = dataclasses.replace(target, config=without)
        assert np.abs(whole_logits(plain, params, tokens) - expected).max() > 100 * TOLERANCE


def test_llama3_scaling_at_positions_to_9000(tmp_path, record_property):
    """Rounding of the angles grows with the position; prefill and verify must round alike."""
    scaling = {**LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
    model = random_model("llama", rope_parameters=scaling)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(9000)
    expected = reference_logits(model, tokens)
    stepped, first = stepped_logits(*load(tmp_path), tokens, chunk=512)
    difference = np.abs(stepped - expected).max()
    record_property("max_logit_difference", float(difference))
    print(f"llama3 at 9000: max logit difference {difference:.1e}")
    assert difference <= TOLERANCE
    assert first == expected[-1].argmax()
