"""A dense model while it is being cut: what its feed-forward networks see, and how well it does when cut.

Channels are masked where the cut model would not compute them; weights and their order stay as they are, so
that one program measures every choice of layers and of experts per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sv_jax.model.cache import empty_cache
from sv_jax.model.transformer import Params, Transformer, compute_logits, forward


class Masks(NamedTuple):
    """Cuts of all L layers. router: float32[L, E, d]. labels: int32[L, F], E for shared channels.
    selected: int32[L], experts per token; E or more: the layer is whole."""

    router: jax.Array
    labels: jax.Array
    selected: jax.Array


def hidden_states(target: Transformer, params: Params, tokens: jax.Array) -> jax.Array:
    """[B, T, d] after the final norm: one dense pass over texts int32[B, T], from position 0 on."""
    batch, length = tokens.shape
    cache = empty_cache(target.config, batch, 8, target.dtype, target.sharding)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    lengths = jnp.zeros(batch, jnp.int32)
    return forward(target, params, tokens, positions, cache, lengths, causal).hidden


def _surprise(target: Transformer, params: Params, tokens: jax.Array) -> jax.Array:
    hidden = hidden_states(target, params, tokens)[:, :-1]
    logits = compute_logits(target, params, hidden)
    right = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - right, axis=-1)


@functools.partial(jax.jit, static_argnames=("target",))
def surprise(target: Transformer, params: Params, tokens: jax.Array) -> jax.Array:
    """float32[B]: -log p of each text int32[B, T] in nats, summed over its T - 1 tokens after the first."""
    return _surprise(target, params, tokens)


@functools.partial(jax.jit, static_argnames=("target",))
def masked_surprise(target: Transformer, params: Params, tokens: jax.Array, masks: Masks) -> jax.Array:
    """`surprise` of the dense model `target` with some of its layers cut."""
    with nn.intercept_methods(_masking(masks)):
        return _surprise(target, params, tokens)


@functools.partial(jax.jit, static_argnames=("target",))
def ffn_inputs(target: Transformer, params: Params, tokens: jax.Array) -> jax.Array:
    """float16[L, B, T, d]: the normed inputs of all feed-forward networks; texts int32[B, T]."""
    seen: dict[int, jax.Array] = {}

    def watch(
        call: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext
    ) -> Any:
        if (place := _place(context)) is not None and place[1] == "gate":
            seen[place[0]] = args[0]
        return call(*args, **kwargs)

    with nn.intercept_methods(watch):
        hidden_states(target, params, tokens)
    return jnp.stack([seen[layer] for layer in range(target.config.num_layers)]).astype(jnp.float16)


def _masking(masks: Masks) -> Callable[..., Any]:
    """Remembers a network's input where its gate is computed, and masks what its down projection is given."""
    seen: dict[int, jax.Array] = {}

    def mask(
        call: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext
    ) -> Any:
        if (place := _place(context)) is not None:
            layer, name = place
            if name == "gate":
                seen[layer] = args[0]
            if name == "down":
                kept = kept_channels(
                    seen[layer], masks.router[layer], masks.labels[layer], masks.selected[layer]
                )
                args = (jnp.where(kept, args[0], jnp.zeros((), args[0].dtype)), *args[1:])
        return call(*args, **kwargs)

    return mask


def kept_channels(x: jax.Array, router: jax.Array, labels: jax.Array, selected: jax.Array) -> jax.Array:
    """bool[B, T, F]: the shared channels and those of the `selected` best experts of each token.

    x [B, T, d]; router [E, d]; labels int32[F]; selected int32[].
    """
    logits = jnp.einsum("btd,ed->bte", x.astype(jnp.float32), router)
    order = jnp.argsort(-logits, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    shared = jnp.ones((*rank.shape[:2], 1), bool)
    return jnp.take(jnp.concatenate([rank < selected, shared], axis=-1), labels, axis=-1)


def _place(context: nn.module.InterceptorContext) -> tuple[int, str] | None:
    """(layer, name) of a linear map of a feed-forward network that is called; None: something else."""
    path = context.module.path
    if context.method_name != "__call__" or len(path) != 3 or path[1] != "ffn":
        return None
    return int(path[0].removeprefix("layers_")), path[2]
