"""Thresholds of sparse feed-forward networks and betas of sparse experts, from a model at work on texts.

thresholds   layer l's is the quantile of |silu(gate)| (or |silu(gate) * up|) that leaves the wanted share
betas        layer l's i-th is the median, or another quantile, of the share of the i least weights
             among those of a token's k experts (SMoE of arXiv 2512.21911)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.config import MoEConfig, UserError
from sv_jax.engine.language_model import LanguageModel
from sv_jax.evaluation.cutting import Case
from sv_jax.model.cache import empty_cache
from sv_jax.model.moe import route
from sv_jax.model.transformer import Params, Transformer
from sv_jax.sparsity.experts import count_skipped, low_shares

CHUNK = 512  # most tokens of a text that are looked at together
BINS = 1 << 15  # of a histogram: the upper half of a float32's bits, so that a bin is 0.8 % wide at most
MEASURES = {"gate": "activated", "product": "product"}  # rule -> what the network sows


class Activity(NamedTuple):
    """What feed-forward layers do on some texts."""

    histograms: np.ndarray  # int64[rules, L, BINS]: of |measure|, over tokens and channels
    votes: tuple[np.ndarray | None, ...]  # per layer float32[F], mean |silu(gate)|; None: no network
    shares: np.ndarray | None  # float32[layers with experts, tokens, k - 1]: see `low_shares`
    weights: np.ndarray | None  # float32[layers with experts, tokens, k], of the experts


class _Seen(NamedTuple):
    histograms: jax.Array  # int32[rules, L, BINS]
    votes: tuple[jax.Array | None, ...]
    probabilities: jax.Array | None  # float32[layers with experts, C, E]


@partial(jax.jit, static_argnames=("target",))
def _watch(target: Transformer, params: Params, tokens: jax.Array) -> _Seen:
    """What the layers do on tokens int32[1, C]."""
    config, count = target.config, tokens.shape[1]
    slots = jnp.arange(count, dtype=jnp.int32)
    mask = (slots[:, None] >= slots)[None]
    cache = empty_cache(config, 1, 128, target.dtype, target.sharding)
    lengths = jnp.zeros(1, jnp.int32)
    _, state = target.apply(
        {"params": params}, tokens, slots[None], cache, lengths, mask, mutable=["intermediates"]
    )
    layers = [state["intermediates"][f"layers_{i}"]["ffn"] for i in range(config.num_layers)]
    networks = [layer.get("shared", {}) if "probabilities" in layer else layer for layer in layers]
    bins = jnp.stack(
        [
            jnp.stack([_histogram(net[name][0]) if name in net else jnp.zeros(BINS, int) for net in networks])
            for name in MEASURES.values()
        ]
    )
    votes = tuple(
        jnp.mean(jnp.abs(net["activated"][0].astype(jnp.float32)), axis=(0, 1)) if net else None
        for net in networks
    )
    probabilities = [layer["probabilities"][0][0] for layer in layers if "probabilities" in layer]
    return _Seen(bins, votes, jnp.stack(probabilities) if probabilities else None)


def _histogram(x: jax.Array) -> jax.Array:
    """int32[BINS] of |x|: ascending in |x|, since a float's bits are."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return jnp.zeros(BINS, jnp.int32).at[(bits >> 16).reshape(-1)].add(1)


def make_chunks(cases: Sequence[Case]) -> list[tuple[int, ...]]:
    """The texts in pieces of one size, CHUNK or what the shortest text has; what is left over is not used."""
    size = min(CHUNK, *(len(case.token_ids) for case in cases))
    return [
        case.token_ids[first : first + size]
        for case in cases
        for first in range(0, len(case.token_ids) - size + 1, size)
    ]


def watch(
    model: LanguageModel,
    chunks: Sequence[Sequence[int]],
    *,
    on_chunk: Callable[[int], Any] = lambda tokens: None,
) -> Activity:
    """Runs every chunk by itself.

    Args:
      chunks: token ids, all of one length.
      on_chunk: called after each with its number of tokens.
    """
    config = model.target.config
    histograms = np.zeros((len(MEASURES), config.num_layers, BINS), np.int64)
    found: list[np.ndarray] = []
    votes: list[tuple[np.ndarray | None, ...]] = []
    for chunk in chunks:
        seen = jax.device_get(_watch(model.target, model.params, np.array([chunk], np.int32)))
        histograms += seen.histograms
        votes.append(seen.votes)
        if seen.probabilities is not None:
            assert config.moe is not None
            found.append(np.asarray(_top_weights(jnp.asarray(seen.probabilities), config.moe)))
        on_chunk(len(chunk))
    means = tuple(None if layer[0] is None else np.mean(layer, axis=0) for layer in zip(*votes))
    if not found:
        return Activity(histograms, means, None, None)
    weights = np.concatenate(found, axis=1)
    return Activity(histograms, means, np.asarray(low_shares(jnp.asarray(weights))), weights)


def _top_weights(probabilities: jax.Array, moe: MoEConfig) -> jax.Array:
    return route(probabilities, moe, None).weights


def find_thresholds(histograms: np.ndarray, density: float, *, one: bool) -> list[float]:
    """The thresholds that keep the share `density` of a rule's channels, each layer by itself.

    Args:
      histograms: int64[L, BINS]. Layers without a network have none, and get 0.
      one: one threshold for all layers, which keeps the share of all of their channels together.
    """
    rows = histograms.sum(axis=0, keepdims=True) if one else histograms
    return [_threshold(row, density) for row in rows]


def _threshold(histogram: np.ndarray, density: float) -> float:
    if not histogram.sum():
        return 0.0
    below = np.cumsum(histogram) / histogram.sum()
    bin_index = int(np.searchsorted(below, 1 - density, side="right"))
    # A bin's lower edge: what is in it is kept.
    return float(np.array(bin_index << 16, np.int32).view(np.float32))


def find_betas(
    activity: Activity, *, max_skipped: int, reading: str, rate: float | None
) -> tuple[list[list[float]], float, float]:
    """Betas of each layer with experts, the quantile that they are, and the share of experts that is skipped.

    Args:
      rate: the share of the experts that is to be skipped on these texts; None: betas are medians, as the
        paper has them.

    Raises:
      UserError: even all of `max_skipped` are fewer.
    """
    assert activity.shares is not None and activity.weights is not None
    shares, weights = activity.shares, activity.weights

    def skipped(quantile: float) -> tuple[np.ndarray, float]:
        betas = np.quantile(shares, quantile, axis=1)  # [layers, k - 1]
        counts = [
            np.asarray(count_skipped(jnp.asarray(w), jnp.asarray(b), jnp.int32(max_skipped), reading))
            for w, b in zip(weights, betas)
        ]
        return betas, float(np.mean(counts)) / weights.shape[-1]

    quantile = 0.5
    if rate is not None:
        most = max_skipped / weights.shape[-1]
        if rate > most:
            raise UserError(f"skip-rate {rate:g}; allowed with max-skipped {max_skipped}: up to {most:.3g}")
        low, high = 0.0, 1.0
        for _ in range(20):  # the rate grows with the quantile
            quantile = (low + high) / 2
            low, high = (quantile, high) if skipped(quantile)[1] < rate else (low, quantile)
    betas, found = skipped(quantile)
    return betas.tolist(), quantile, found
