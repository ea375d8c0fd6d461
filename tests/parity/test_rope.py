"""Rotary frequencies against transformers' own, for scalings of published models."""

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from sv_jax.checkpoints.hf_config import model_config  # noqa: E402
from sv_jax.model.layers import rope_frequencies  # noqa: E402

pytestmark = pytest.mark.parity

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
SCALINGS = {
    "llama 3.1": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama 3.2": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "qwen yarn": YARN,
    "yarn, other betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, own attention factor": {**YARN, "attention_factor": 0.7},
    "yarn, deepseek": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, factor below 1": {**YARN, "factor": 0.5},
}


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies(name, head_dim, theta):
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters={"rope_theta": theta, **SCALINGS[name]},
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](config, "cpu")
    ours, our_magnitude = rope_frequencies(model_config(config.to_dict()))
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6)
    # Rounded like transformers' float32: angles at position 9,000 need it. (torch's pow is not always
    # correctly rounded; frequencies rounded once, from float64, agree in half of the channels.)
    assert (ours == expected.numpy()).mean() > 0.85
    assert our_magnitude == pytest.approx(magnitude, rel=1e-6)
