"""The gated feed-forward network: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import flax.linen as nn
import jax

from sv_jax.config import ModelConfig
from sv_jax.model.layers import Linear


class FeedForward(nn.Module):
    """SwiGLU over F channels, x [B, T, d] -> [B, T, d]."""

    config: ModelConfig
    dtype: str
    size: int | None = None  # F; None: the config's

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, size = self.config, self.size or self.config.intermediate_size

        def linear(name: str, features: int, axes: tuple[str, str]) -> Linear:
            return Linear(features, axes, config.mlp_bias, self.dtype, name=name)

        gate = linear("gate", size, ("embed", "ffn"))(x)
        up = linear("up", size, ("embed", "ffn"))(x)
        return linear("down", config.hidden_size, ("ffn", "embed"))(nn.silu(gate) * up)
