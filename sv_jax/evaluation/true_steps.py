"""Teacher forcing: a case's true tokens, step by step, over a cache that dense passes filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.config import UserError
from sv_jax.engine.buckets import bucket_for, largest_bucket
from sv_jax.engine.decoding import plan_prefill, prefill, start
from sv_jax.engine.language_model import LanguageModel
from sv_jax.evaluation.selectors import block_masses
from sv_jax.evaluation.texts import Case
from sv_jax.model.cache import KVCache, LayerKV
from sv_jax.model.choices import Choices
from sv_jax.model.transformer import Params, Transformer
from sv_jax.sharding import Sharding
from sv_jax.sparsity.summaries import BlockSummaries, start_summaries, update_summaries
from sv_jax.speculation.request import make_request
from sv_jax.speculation.types import Draft
from sv_jax.speculation.verify import verify


class DensePass(NamedTuple):
    logits: jax.Array  # float32[B, T, V]
    new_kv: tuple[LayerKV, ...]
    masses: dict[int, tuple[jax.Array, ...]]  # by block size, per layer float32[B, K, S / block_size]
    right: jax.Array  # bool[B, T]: the most likely token is the one that the text goes on with


class TrueStep(NamedTuple):
    """T true tokens and what lies before them. Asking for the next step takes the cache away."""

    number: int
    length: int  # committed tokens, of every row
    compared: int  # of the T nodes, the first so many predict a measured token
    tokens: jax.Array  # int32[B, T], the first at position `length`
    following: jax.Array  # int32[B, T], what comes after each
    nodes: jax.Array  # bool[B, T]: the compared ones; what lies behind them does not exist
    cache: KVCache
    lengths: jax.Array  # int32[B]
    summaries: dict[int, BlockSummaries]  # by block size, of every layer
    dense: DensePass


def chain(tokens: jax.Array) -> Draft:
    """The draft of one branch whose nodes are tokens int32[B, T]."""
    parents = jnp.arange(-1, tokens.shape[1] - 1, dtype=jnp.int32)
    return Draft(tokens, jnp.broadcast_to(parents, tokens.shape))


@partial(jax.jit, static_argnames=("target", "block_sizes"))
def dense_pass(
    target: Transformer,
    params: Params,
    cache: KVCache,
    lengths: jax.Array,
    tokens: jax.Array,
    following: jax.Array,
    nodes: jax.Array,
    *,
    block_sizes: tuple[int, ...],
) -> DensePass:
    """A dense step over T true tokens, and the attention that it paid to each block.

    Args:
      tokens: int32[B, T], the first at position lengths[b]. following: int32[B, T], what comes after each.
      nodes: bool[B, T], tokens whose attention counts.
    """
    finest = min(block_sizes, default=0)  # 0: nobody asks for masses
    masses: list[jax.Array] = []

    def watch(layer: int, q: jax.Array, cached: LayerKV, chosen: object) -> None:
        window = target.config.sliding_window(layer)
        masses.append(block_masses(q, cached, lengths, nodes, block_size=finest, window=window))

    verified = verify(target, params, cache, lengths, chain(tokens), Choices(watch if finest else None))
    by_size = {
        size: tuple(jnp.sum(m.reshape(*m.shape[:2], -1, size // finest), axis=-1) for m in masses)
        for size in block_sizes
    }
    right = jnp.argmax(verified.logits, axis=-1) == following
    return DensePass(verified.logits, verified.new_kv, by_size, right)


@partial(jax.jit, static_argnames=("sharding",), donate_argnames=("cache", "summaries"))
def _advance(
    sharding: Sharding,
    cache: KVCache,
    summaries: dict[int, BlockSummaries],
    lengths: jax.Array,
    new_kv: tuple[LayerKV, ...],
) -> tuple[KVCache, dict[int, BlockSummaries], jax.Array]:
    """Commits the dense pass's tokens, all of them."""
    num_tokens = new_kv[0][0].shape[1]
    cache = cache.write(new_kv, lengths, sharding)
    after = lengths + num_tokens
    summaries = {
        size: update_summaries(x, cache, lengths, after, num_tokens, sharding)
        for size, x in summaries.items()
    }
    return cache, summaries, after


@partial(jax.jit, static_argnames=("target", "block_sizes", "statistics"))
def _summarise_all(
    target: Transformer,
    cache: KVCache,
    lengths: jax.Array,
    *,
    block_sizes: tuple[int, ...],
    statistics: tuple[str, ...],
) -> dict[int, BlockSummaries]:
    """Every statistic of every layer, for each block size."""
    every = {}
    for size in block_sizes:
        empty = start_summaries(
            size, statistics, range(target.config.num_layers), target.config, cache.batch, cache.capacity
        )
        nothing = jnp.zeros_like(lengths)
        every[size] = update_summaries(empty, cache, nothing, lengths, cache.capacity, target.sharding)
    return every


def split_case(total: int, measured: int, width: int) -> tuple[int, int]:
    """Of a case of `total` tokens: those before the first step, and steps of `width` tokens.

    Raises UserError where nothing would be left before the first step.
    """
    prefix = total - measured - 1  # the first root predicts the first measured token
    if prefix < 1:
        raise UserError(f"a case of {total} tokens has {measured} measured; allowed: at most {total - 2}")
    return prefix, -(-measured // width)


def true_steps(
    model: LanguageModel,
    cases: Sequence[Case],
    *,
    num_speculative_tokens: int,
    block_sizes: tuple[int, ...],
    statistics: tuple[str, ...],
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[TrueStep]:
    """Runs one batch of cases, all of one length and with as many measured tokens, T = K + 1 tokens a step.

    Args:
      cases: their number is a multiple of the mesh's data axis.
      block_sizes, statistics: of the summaries that are kept.
      should_stop: asked before each chunk of the prefill and each step; True ends the steps.
    """
    lengths = {(len(case.token_ids), case.measured) for case in cases}
    if len(lengths) != 1:
        raise ValueError(f"cases of {sorted(lengths)} (tokens, measured) in one batch; allowed: one of them")
    ((total, measured),) = lengths
    width = num_speculative_tokens + 1
    prefix, steps = split_case(total, measured, width)
    target, params = model.target, model.params

    parts = target.sharding.parts("kv_length")
    capacity_limit = largest_bucket(model.max_model_len, width, parts)
    chunks = plan_prefill(target, len(cases), prefix, capacity_limit)
    capacity = bucket_for(max(sum(chunks), prefix + steps * width), capacity_limit, parts)
    request = make_request([prefix] * len(cases), [total + width] * len(cases))
    state = start(target, request, capacity=capacity)
    prompts = [case.token_ids[:prefix] for case in cases]
    state = prefill(target, params, prompts, state, chunks, should_stop)
    if should_stop():
        return
    cache, at = state.cache, state.lengths
    summaries = _summarise_all(target, cache, at, block_sizes=block_sizes, statistics=statistics)
    ids = np.zeros((len(cases), total + width + 1), np.int32)
    ids[:, :total] = [case.token_ids for case in cases]
    for step in range(steps):
        if should_stop():
            return
        first = prefix + step * width
        tokens, following = (
            jax.device_put(ids[:, i : i + width], target.sharding.named("batch", None))
            for i in (first, first + 1)
        )
        compared = min(width, total - 1 - first)
        nodes = np.broadcast_to(np.arange(width) < compared, (len(cases), width))
        nodes = jax.device_put(nodes, target.sharding.named("batch", None))
        dense = dense_pass(target, params, cache, at, tokens, following, nodes, block_sizes=block_sizes)
        yield TrueStep(step, first, compared, tokens, following, nodes, cache, at, summaries, dense)
        cache, summaries, at = _advance(model.target.sharding, cache, summaries, at, dense.new_kv)
