import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.config import RopeScaling
from sv_jax.model.layers import Embedding, Linear, RMSNorm, apply_rope, rope_angles, rope_frequencies
from tests.tiny import TINY, replace


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 4e-3)])
def test_linear(dtype, tolerance):
    """y = x W + b with float32 sums: in bfloat16 only the result is rounded."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 512)), dtype)
    kernel = jnp.asarray(rng.normal(size=(512, 5)), dtype)
    bias = jnp.asarray(rng.normal(size=5), dtype)
    layer = Linear(5, ("embed", "heads"), use_bias=True, dtype=dtype)
    y = layer.apply({"params": {"kernel": kernel, "bias": bias}}, x)
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64) + np.asarray(bias, np.float64)
    assert y.dtype == dtype and y.shape == (2, 3, 5)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=tolerance, atol=1e-3)


def test_float32_logits_of_a_bfloat16_head_are_not_rounded():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 1, 64)), "bfloat16")
    table = jnp.asarray(rng.normal(size=(7, 64)), "bfloat16")
    head = Linear(7, ("embed", "vocab"), dtype="bfloat16", output_dtype="float32")
    expected = np.asarray(x, np.float64) @ np.asarray(table, np.float64).T
    for logits in (
        head.apply({"params": {"kernel": table.T}}, x),
        Embedding(7, 64, "bfloat16").apply({"params": {"embedding": table}}, x, method=Embedding.attend),
    ):
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 8e-3)])
def test_rms_norm(dtype, tolerance):
    rng = np.random.default_rng(0)
    # Values whose squares would lose the epsilon, or the mean, in bfloat16.
    x = jnp.asarray(rng.normal(size=(2, 3, 300)) * 1e-3 + 5e-3, dtype)
    scale = jnp.asarray(rng.normal(size=300), dtype)
    y = RMSNorm(1e-5, dtype).apply({"params": {"scale": scale}}, x)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(scale, np.float64)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=tolerance, atol=1e-7)


def test_rope_rotates_pairs_half_a_head_apart():
    x = np.random.default_rng(0).normal(size=(1, 2, 1, 8)).astype(np.float32)
    positions = jnp.array([[3, 11]])
    rotated = apply_rope(jnp.asarray(x), *rope_angles(TINY, positions))
    for t, position in enumerate((3, 11)):
        for i in range(4):
            turn = np.exp(1j * position * 10_000.0 ** (-2 * i / 8))
            pair = (x[0, t, 0, i] + 1j * x[0, t, 0, i + 4]) * turn
            np.testing.assert_allclose(rotated[0, t, 0, i], pair.real, atol=1e-5)
            np.testing.assert_allclose(rotated[0, t, 0, i + 4], pair.imag, atol=1e-5)


def test_scaled_rope_keeps_fast_channels_and_stretches_slow_ones():
    """What both llama3 and yarn promise, whatever their formulas."""
    config = replace(TINY, head_dim=64, rope_theta=500_000.0)
    plain, _ = rope_frequencies(config)
    for kind in ("llama3", "yarn"):
        scaling = RopeScaling(kind=kind, factor=8.0, original_max_position_embeddings=8192)
        scaled, _ = rope_frequencies(replace(config, rope_scaling=scaling))
        np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-6)
        np.testing.assert_allclose(scaled[-1], plain[-1] / 8, rtol=1e-6)
        assert (np.diff(scaled) < 0).all()


def test_rope_angles_do_not_depend_on_how_positions_are_grouped():
    """Prefill, verify and draft see one position at different places of different shapes."""
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=64)
    config = replace(TINY, rope_scaling=scaling)
    angles = jax.jit(lambda positions: rope_angles(config, positions))
    whole = angles(jnp.arange(9000)[None])
    step = angles(jnp.array([[8990, 8991, 8991]]))
    for one, other in zip(whole, step):
        np.testing.assert_array_equal(one[0, [8990, 8991, 8991]], other[0])
