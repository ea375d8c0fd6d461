"""One decoder-only transformer for every family; cache in, keys and values of the new tokens out."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.platform import lies_by_columns
from sv_jax.config import ModelConfig
from sv_jax.model.attention import Attention
from sv_jax.model.cache import KVCache, LayerKV, empty_cache
from sv_jax.model.cached_attention import Selection
from sv_jax.model.choices import DENSE, Choices
from sv_jax.model.ffn import FeedForward
from sv_jax.model.layers import Embedding, Linear, RMSNorm, rope_angles
from sv_jax.model.moe import FFNReads, MoE
from sv_jax.sharding import Sharding

Params = dict[str, Any]


class Pass(NamedTuple):
    """What one forward pass over T new tokens gives."""

    hidden: jax.Array  # [B, T, d] after the final norm
    new_kv: tuple[LayerKV, ...]  # per layer (keys, values) of the T tokens, [B, T, K, D]
    chosen: tuple[Selection | None, ...]  # per layer, the blocks of the cache that were read; None: all
    ffn: tuple[FFNReads, ...]  # per layer


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    config: ModelConfig
    layer: int
    dtype: str
    sharding: Sharding
    implementation: str | None

    def setup(self) -> None:
        config = self.config
        epsilon = config.rms_norm_eps
        self.attention_norm = RMSNorm(epsilon, self.dtype)
        window = config.sliding_window(self.layer)
        self.attention = Attention(config, window, self.dtype, self.sharding, self.implementation)
        self.ffn_norm = RMSNorm(epsilon, self.dtype)
        self.ffn: FeedForward | MoE = (
            MoE(config, self.dtype, self.sharding)
            if config.has_experts(self.layer)
            else FeedForward(config, self.dtype, self.sharding)
        )

    def __call__(
        self, x: jax.Array, live: jax.Array | None, choices: Choices, *attention_arguments: Any
    ) -> tuple[jax.Array, LayerKV, Selection | None, FFNReads]:
        with jax.named_scope("attention"):
            attended, new_kv, selection = self.attention(self.attention_norm(x), *attention_arguments)
            x = self.sharding.constrain(x + attended, "batch", None, None)
        with jax.named_scope("ffn"):
            out, reads = self._feed_forward(self.ffn_norm(x), live, choices)
            x = self.sharding.constrain(x + out, "batch", None, None)
        return x, new_kv, selection, reads

    def _feed_forward(
        self, x: jax.Array, live: jax.Array | None, choices: Choices
    ) -> tuple[jax.Array, FFNReads]:
        channels = None if choices.channels is None else choices.channels(self.layer)
        if isinstance(self.ffn, MoE):
            choose = None if choices.experts is None else partial(choices.experts, self.layer)
            return self.ffn(x, live, choose, channels, choices.counts_experts)
        out, reads = self.ffn(x, live, channels)
        return out, FFNReads(None, reads)


class Transformer(nn.Module):
    """A target model. Hashable, so jitted functions take it as a static argument.

    Layers are unrolled, each with its own cache array: per-layer choices stay plain Python, and no scan
    copies stacked caches.
    """

    config: ModelConfig
    dtype: str
    sharding: Sharding
    implementation: str | None = None  # of attention over the cache, see cached_attention.CacheReader

    def setup(self) -> None:
        config = self.config
        self.embedding = Embedding(config.vocab_size, config.hidden_size, self.dtype)
        self.layers = [
            Block(config, i, self.dtype, self.sharding, self.implementation) for i in range(config.num_layers)
        ]
        self.final_norm = RMSNorm(config.rms_norm_eps, self.dtype)
        if not config.tie_word_embeddings:
            columns = config.vocab_size // self.sharding.parts("vocab")
            self.head = Linear(
                config.vocab_size,
                ("embed", "vocab"),
                False,
                self.dtype,
                output_dtype="float32",
                by_columns=lies_by_columns(self.sharding.platform, config.hidden_size, columns),
            )

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        lengths: jax.Array,
        mask: jax.Array,
        choices: Choices = DENSE,
        live: jax.Array | None = None,
    ) -> Pass:
        """Runs T new tokens per row behind a committed prefix.

        Args:
          tokens: int32[B, T]. positions: int32[B, T], absolute. cache, lengths: the committed prefix.
          mask: bool[B, T, T], True where new token t sees new token u (itself included).
          choices: what each layer leaves out.
          live: bool[B, T], tokens whose output counts: no expert is read for the others. None: all do.

        The cache is read only; committing is the caller's.
        """
        x = self.sharding.constrain(self.embedding(tokens), "batch", None, None)
        rope = rope_angles(self.config, positions)
        new_kv: list[LayerKV] = []
        chosen: list[Selection | None] = []
        ffn: list[FFNReads] = []

        def choose_for(layer: int, cached: LayerKV, q: jax.Array) -> Selection | None:
            return None if choices.blocks is None else choices.blocks(layer, q, cached, tuple(chosen))

        for i, block in enumerate(self.layers):
            cached = (cache.keys[i], cache.values[i])
            choose_here = partial(choose_for, i, cached)
            x, layer_kv, selection, reads = block(
                x, live, choices, rope, positions, cached, lengths, mask, choose_here
            )
            new_kv.append(layer_kv)
            chosen.append(selection)
            ffn.append(reads)
        return Pass(self.final_norm(x), tuple(new_kv), tuple(chosen), tuple(ffn))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32[..., V] of hidden [..., d]."""
        with jax.named_scope("head"):
            if self.config.tie_word_embeddings:
                return self.embedding.attend(hidden)
            return self.head(hidden)

    def run_all(self, *arguments: Any) -> jax.Array:
        """Forward and logits in one, so that `init` meets every parameter."""
        return self.logits(self(*arguments).hidden)


def forward(
    target: Transformer,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    cache: KVCache,
    lengths: jax.Array,
    mask: jax.Array,
    choices: Choices = DENSE,
    live: jax.Array | None = None,
) -> Pass:
    """`Transformer.__call__` as a pure function of parameters."""
    return cast(Any, target.apply({"params": params}, tokens, positions, cache, lengths, mask, choices, live))


def compute_logits(target: Transformer, params: Params, hidden: jax.Array) -> jax.Array:
    """`Transformer.logits` as a pure function of parameters."""
    return cast(jax.Array, target.apply({"params": params}, hidden, method=Transformer.logits))


def _init(target: Transformer, key: jax.Array) -> Params:
    rows, slots = target.sharding.data_size, target.sharding.parts("kv_length")
    one = jnp.zeros((rows, 1), jnp.int32)
    mask = jnp.ones((rows, 1, 1), bool)
    cache = empty_cache(target.config, rows, slots, target.dtype, target.sharding)
    plain = target.clone(implementation="xla")  # so few slots are none for a kernel
    return plain.init(key, one, one, cache, one[:, 0], mask, method=Transformer.run_all)["params"]


def logical_params(target: Transformer) -> tuple[Params, Params]:
    """The parameter tree twice: as ShapeDtypeStructs, and with the logical axes of each in its place.

    Neither depends on the mesh.
    """
    boxed = jax.eval_shape(lambda: _init(target, jax.random.key(0)))
    return nn.meta.unbox(boxed), nn.get_partition_spec(boxed)


def abstract_params(target: Transformer) -> Params:
    """The parameter tree as ShapeDtypeStructs with their shardings: what a checkpoint is loaded into."""
    return jax.tree.map(
        lambda leaf, axes: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=target.sharding.named(*axes)
        ),
        *logical_params(target),
    )


def random_params(target: Transformer, seed: int = 0) -> Params:
    """Random weights on their shards, for tests and for timing shapes whose weights are not at hand."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(target))
    init = jax.jit(lambda: nn.meta.unbox(_init(target, jax.random.key(seed))), out_shardings=shardings)
    return init()
