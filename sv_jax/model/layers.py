"""The small parts of a transformer: linear maps, norms, rotary positions, embeddings."""

from __future__ import annotations

import math
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.cache_attention.reference import matmul_precision
from sv_jax.config import ModelConfig, RopeScaling


def multiply(x: jax.Array, kernel: jax.Array, in_axis: int = 0) -> jax.Array:
    """x [..., in] times kernel [in, out] (or [out, in], in_axis 1) -> float32 [..., out]."""
    # The float32 result keeps bfloat16 on XLA's fast path on CPU (scripts/bench_linear.py: 2 to 6 times).
    return jax.lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (in_axis,)), ((), ())),
        precision=matmul_precision(kernel.dtype),
        preferred_element_type=jnp.float32,
    )


def parameter(
    module: nn.Module, name: str, init: nn.initializers.Initializer, axes: tuple[str | None, ...], *shape: Any
) -> jax.Array:
    """Declares one parameter: `shape` holds shape and dtype; its sharding follows from the logical axes."""
    value = module.param(name, nn.with_logical_partitioning(init, axes), *shape)
    return cast(jax.Array, value)


def take_channels(x: jax.Array, chosen: jax.Array, axis: int) -> jax.Array:
    """x with the channels `chosen` int32[shards, n] of its axis; shards stay where they are.

    Each shard's channels are taken out of its own part of the axis, so that none has to travel.
    """
    shards, count = chosen.shape
    shape = x.shape
    split = x.reshape(*shape[:axis], shards, shape[axis] // shards, *shape[axis + 1 :])
    if shards == 1:
        return jnp.take(split.reshape(shape), chosen[0], axis=axis)
    index = chosen.reshape(*[1] * axis, shards, count, *[1] * (len(shape) - axis - 1))
    taken = jnp.take_along_axis(split, index, axis=axis + 1)
    return taken.reshape(*shape[:axis], shards * count, *shape[axis + 1 :])


class Linear(nn.Module):
    """y = x W + b with W [in, out]: checkpoints store the transpose; accumulates in float32.

    The few vectors of a verify step read weights 1.2 to 1.5 times as fast this way on CPU
    (scripts/bench_linear.py); for one vector, and for many, the orientation makes no difference.
    """

    features: int
    axes: tuple[str, str]  # logical axes of W: (in, out)
    use_bias: bool = False
    dtype: str = "float32"
    output_dtype: str | None = None  # None: dtype
    in_features: int | None = None  # None: as many as x has
    by_columns: bool = False  # how W lies in memory where the platform wants that told, `lies_by_columns`

    @nn.compact
    def __call__(
        self, x: jax.Array, *, inputs: jax.Array | None = None, outputs: jax.Array | None = None
    ) -> jax.Array:
        """x [.., in] -> [.., out].

        Args:
          inputs: the channels that x has, as `take_channels` takes them; None: all.
          outputs: the channels that are wanted; None: all.
        """
        init = nn.initializers.lecun_normal()
        shape = (self.in_features or x.shape[-1], self.features)
        kernel = parameter(self, "kernel", init, self.axes, shape, self.dtype)
        if self.by_columns:
            # Left to itself, XLA for TPU relays a vocabulary's columns: once for the verify steps of a slice,
            # and back in each plain step.
            kernel = with_layout_constraint(kernel, Layout(major_to_minor=(1, 0)))
        if inputs is not None:
            kernel = take_channels(kernel, inputs, axis=0)
        if outputs is not None:
            kernel = take_channels(kernel, outputs, axis=1)
        y = multiply(x, kernel)
        if self.use_bias:
            zeros = nn.initializers.zeros
            bias = parameter(self, "bias", zeros, self.axes[1:], (self.features,), self.dtype)
            y = y + (bias if outputs is None else take_channels(bias, outputs, axis=0))
        return y.astype(self.output_dtype or self.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, in float32."""

    epsilon: float
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = parameter(self, "scale", nn.initializers.ones, (None,), (x.shape[-1],), self.dtype)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale.astype(jnp.float32)).astype(x.dtype)


class Embedding(nn.Module):
    """Token embedding [V, d]; tied models read logits from the same table."""

    vocab_size: int
    features: int
    dtype: str = "float32"

    def setup(self) -> None:
        init, shape = nn.initializers.normal(0.02), (self.vocab_size, self.features)
        self.embedding = parameter(self, "embedding", init, ("vocab", "embed"), shape, self.dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.embedding, tokens, axis=0)

    def attend(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., V] of hidden [..., d]."""
        return multiply(hidden, self.embedding, in_axis=1)


def _yarn_frequencies(periods: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """YaRN (arXiv 2309.00071): interpolate slow channels, keep fast ones, ramp between."""
    original, channels = scaling.original_max_position_embeddings, len(periods)

    def channel(rotations: float) -> float:
        return channels * math.log(original / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * channels - 1)
    ramp = (np.arange(channels, dtype=np.float32) - low) / max(high - low, 1e-3)
    keep = 1 - np.clip(ramp, 0, 1)
    return 1 / (scaling.factor * periods) * (1 - keep) + 1 / periods * keep


def _llama3_frequencies(base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: wavelengths beyond the original context are stretched, middle ones blended."""
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / base
    blend = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = np.clip(blend, 0, 1)
    return (1 - blend) * base / scaling.factor + blend * base


def _yarn_magnitude(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Angular frequencies float32[D/2] (radians a position) and the factor on cos and sin.

    In float32 and in the order of transformers' operations: models were trained with those roundings, and
    one unit in the last place of a frequency moves logits by 2e-3 at position 4,000.
    """
    dim, scaling = config.head_dim, config.rope_scaling
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    periods = (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    frequencies, magnitude = 1 / periods, 1.0
    if scaling is not None:
        if scaling.kind == "linear":
            frequencies = frequencies / scaling.factor
        elif scaling.kind == "llama3":
            frequencies = _llama3_frequencies(frequencies, scaling)
        else:
            frequencies = _yarn_frequencies(periods, config.rope_theta, scaling)
            magnitude = _yarn_magnitude(scaling)
    assert frequencies.dtype == np.float32
    return frequencies, magnitude


def rope_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32[B, T, 1, D], for absolute positions int32[B, T]."""
    frequencies, magnitude = rope_frequencies(config)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    # XLA fuses cosines into every use of them, once per head and layer; of a concatenation it makes an array.
    cos, sin = (f(angles[:, :, None, :]) * magnitude for f in (jnp.cos, jnp.sin))
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([sin, sin], axis=-1)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [B, T, heads, D]; channel i pairs with i + D/2 (the Hugging Face convention)."""
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    return (wide * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)
