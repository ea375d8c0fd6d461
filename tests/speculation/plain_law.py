"""The law of plain sampling written once more in numpy, and a chi-square test against it."""

from __future__ import annotations

import numpy as np
from scipy import stats

from sv_jax.sampling_params import SamplingParams


def plain_logits(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64[V]: temperature, then top-k, top-p, min-p; what a filter removes is -inf. By sorting; equal
    logits stay or go together."""
    scaled = np.asarray(logits, np.float64) / (params.temperature or 1.0)
    if params.top_k:
        kth = np.sort(scaled)[::-1][min(params.top_k, len(scaled)) - 1]
        scaled = np.where(scaled >= kth, scaled, -np.inf)
    if params.top_p < 1:
        probs = softmax(scaled)
        descending = np.sort(probs)[::-1]
        above = np.concatenate([[0.0], np.cumsum(descending)[:-1]])  # before each token, in this order
        smallest = descending[above < params.top_p][-1]
        scaled = np.where(probs >= smallest, scaled, -np.inf)
    if params.min_p:
        probs = softmax(scaled)
        scaled = np.where(probs >= params.min_p * probs.max(), scaled, -np.inf)
    return scaled


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def plain_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64[V]: probabilities of the next token."""
    if params.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    return softmax(plain_logits(logits, params))


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of counts under a law, both [N]; 0 where something came that has no probability.

    Cells that expect less than 10 are taken together.
    """
    expected = law * counts.sum()
    if counts[law == 0].any():
        return 0.0
    few = expected < 10
    groups = [(counts[~few], expected[~few])]
    if expected[few].sum() > 0:
        groups.append((counts[few].sum(keepdims=True), expected[few].sum(keepdims=True)))
    observed, expected = (np.concatenate(parts) for parts in zip(*groups))
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(observed) - 1))
