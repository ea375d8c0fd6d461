"""Attention of one step: over the committed cache, over the step's own tokens, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.cache_attention.reference import (
    from_rows,
    masked_softmax,
    matmul_precision,
    to_rows,
)
from sv_jax.config import ModelConfig
from sv_jax.model.cache import LayerKV
from sv_jax.model.cached_attention import CacheReader, Selection
from sv_jax.model.layers import Linear, RMSNorm, apply_rope
from sv_jax.sharding import Sharding


class BlockChooser(Protocol):
    """Decides for each layer what it reads; plain Python at trace time."""

    def __call__(
        self, layer: int, q: jax.Array, cached: LayerKV, chosen: tuple[Selection | None, ...]
    ) -> Selection | None:
        """What `layer` reads; None: everything.

        Args:
          q: [B, T, H, D] after RoPE. cached: K and V of the layer. chosen: by the layers before it.
        """


def step_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Attention among the T tokens of a step.

    Args:
      q: [B, T, H, D]. k, v: [B, T, K, D]. mask: bool[B, T, T], True where query t sees token u.

    Returns:
      out float32[B, T, H, D] and lse float32[B, T, H], as `cache_attention` gives them.
    """
    num_tokens, kv_heads = k.shape[1:3]
    rows = to_rows(q, kv_heads)  # [B, K, R, D]
    product = partial(
        jax.lax.dot_general, precision=matmul_precision(k.dtype), preferred_element_type=jnp.float32
    )
    scores = product(rows, k, (((3,), (3,)), ((0, 1), (0, 2)))) * scale  # [B, K, R, U]
    by_head = (*scores.shape[:2], -1, num_tokens, num_tokens)
    weights, total, lse = masked_softmax(scores.reshape(by_head), mask[:, None, None])
    weights, total, lse = (x.reshape(*scores.shape[:3], -1) for x in (weights, total, lse))
    out = product(weights.astype(v.dtype), v, (((3,), (1,)), ((0, 1), (0, 2))))
    out = out / jnp.where(total > 0, total, 1.0)
    return from_rows(out, num_tokens), from_rows(lse, num_tokens)[..., 0]


def merge_attention(parts: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Joins attention over disjoint sets of positions: each (out, lse) weighs exp(lse).

    A part with lse = -inf weighs nothing; the step's own part always has the token itself.
    """
    lses = jnp.stack([lse for _, lse in parts])
    weights = jax.nn.softmax(lses, axis=0)
    return sum(weights[i][..., None] * out for i, (out, _) in enumerate(parts))  # type: ignore[return-value]


class Attention(nn.Module):
    """Grouped-query attention of T new tokens over a cached prefix and each other."""

    config: ModelConfig
    window: int | None
    dtype: str
    sharding: Sharding
    implementation: str | None  # of attention over the cache, see CacheReader

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        cached: LayerKV,
        lengths: jax.Array,
        mask: jax.Array,
        choose: Callable[[jax.Array], Selection | None],
    ) -> tuple[jax.Array, LayerKV, Selection | None]:
        """x [B, T, d] -> output [B, T, d], (keys, values) of the T tokens, [B, T, K, D] each, and the blocks
        that were read: those that `choose` names when it is given the queries [B, T, H, D]."""
        config = self.config

        def project(name: str, heads: int, axis: str) -> jax.Array:
            linear = Linear(
                heads * config.head_dim, ("embed", axis), config.attention_bias, self.dtype, name=name
            )
            y = linear(x)
            if config.qk_norm is not None:
                # One vector's product with a matrix is a sum to XLA's TPU compiler, and a sum over each head
                # behind it then reshapes the matrix: a float32 copy of the weights, in every step.
                y = jax.lax.optimization_barrier(y)
            y = y.reshape(*x.shape[:2], heads, config.head_dim)
            return self.sharding.constrain(y, "batch", None, axis, None)

        q = project("query", config.num_heads, "heads")
        k = project("key", config.num_kv_heads, "kv_heads")
        v = project("value", config.num_kv_heads, "kv_heads")
        if config.qk_norm is not None:
            q, k = self._normed("query_norm", q), self._normed("key_norm", k)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)

        scale = config.head_dim**-0.5
        selection = choose(q)
        with jax.named_scope("cache_attention"):
            reader = CacheReader(self.window, scale, self.implementation, self.sharding)
            over_cache = reader.attend(q, cached, lengths, positions, selection)
        with jax.named_scope("step_attention"):
            if self.window is not None:
                ahead = positions[:, :, None] - positions[:, None, :]
                mask = mask & (ahead < self.window)
            among_step = step_attention(q, k, v, mask, scale=scale)
        out = merge_attention([over_cache, among_step]).astype(self.dtype)
        out = out.reshape(*x.shape[:2], config.num_heads * config.head_dim)
        output = Linear(
            config.hidden_size, ("heads", "embed"), config.attention_output_bias, self.dtype, name="output"
        )
        return output(out), (k, v), selection

    def _normed(self, name: str, x: jax.Array) -> jax.Array:
        """x [B, T, heads, D], over each head or over all of them together."""
        norm = RMSNorm(self.config.rms_norm_eps, self.dtype, name=name)
        if self.config.qk_norm == "head":
            return norm(x)
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
