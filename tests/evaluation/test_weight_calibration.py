"""Thresholds and betas: quantiles of what a model does, against NumPy and what they then leave out."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.config import MoEConfig, UserError
from sv_jax.evaluation.cutting import Case
from sv_jax.evaluation.weight_calibration import (
    BINS,
    CHUNK,
    Activity,
    _histogram,
    find_betas,
    find_thresholds,
    make_chunks,
    watch,
)
from sv_jax.sparsity.experts import count_skipped
from tests.tiny import TINY, make_model, random_prompts, replace

K, E = 3, 8
MOE = MoEConfig(E, K, 16, norm_topk_prob=True, shared_expert_size=24)
CONFIG = replace(TINY, moe=MOE, num_layers=3, dense_ffn_layers=(1,), max_position_embeddings=2048)


def cases(*lengths: int) -> list[Case]:
    return [
        Case(f"c{i}", "ordinary", f"d{i}", tuple(ids), 8) for i, ids in enumerate(random_prompts(lengths))
    ]


@functools.cache
def activity(config=CONFIG) -> Activity:
    target, params = make_model(config)
    chunks = make_chunks(cases(CHUNK, 2 * CHUNK + 3))
    return watch(SimpleNamespace(target=target, params=params), chunks)


def test_thresholds_are_quantiles():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 100, 50)).astype(np.float32) * np.array([1, 3], np.float32)[:, None, None]
    histograms = np.stack([np.asarray(_histogram(jnp.asarray(layer))) for layer in x])
    for density in (0.1, 0.5, 0.9):
        for one, groups in ((False, x), (True, x[None])):
            got = find_thresholds(histograms, density, one=one)
            expected = [np.quantile(abs(group), 1 - density) for group in groups]
            np.testing.assert_allclose(got, expected, rtol=0.02)
    assert find_thresholds(np.zeros((1, BINS), int), 0.5, one=False) == [0.0]


def test_everything_is_looked_at_once():
    """Three chunks; each layer's own network, of a layer with experts the shared one."""
    found = activity()
    channels = [24, TINY.intermediate_size, 24]
    assert found.histograms.sum(axis=-1).tolist() == [[3 * CHUNK * n for n in channels]] * 2
    assert found.shares.shape == (2, 3 * CHUNK, K - 1) and found.weights.shape == (2, 3 * CHUNK, K)
    np.testing.assert_allclose(found.weights.sum(-1), 1, rtol=1e-5)
    assert [len(votes) for votes in found.votes] == channels and all((v > 0).all() for v in found.votes)
    dense = activity(replace(CONFIG, moe=None, dense_ffn_layers=()))
    assert dense.shares is None and dense.histograms.sum() == 2 * 3 * 3 * CHUNK * TINY.intermediate_size


def test_chunks():
    texts = cases(CHUNK, 2 * CHUNK + 3)
    assert make_chunks(texts)[1:] == [texts[1].token_ids[:CHUNK], texts[1].token_ids[CHUNK : 2 * CHUNK]]
    assert [len(chunk) for chunk in make_chunks(cases(100, 250))] == [100, 100, 100]


def test_betas_are_medians_unless_a_rate_is_wanted():
    found = activity()
    betas, quantile, rate = find_betas(found, max_skipped=1, reading="first", rate=None)
    np.testing.assert_allclose(betas, np.median(found.shares, axis=1), rtol=1e-6)
    assert quantile == 0.5 and rate == pytest.approx(0.5 / K, abs=0.01)  # a median: half of the tokens
    for reading, wanted in [("first", 0.3), ("largest", 0.1)]:
        betas, _, rate = find_betas(found, max_skipped=2, reading=reading, rate=wanted)
        assert rate == pytest.approx(wanted, abs=0.01)
        skipped = [
            np.asarray(count_skipped(jnp.asarray(w), jnp.asarray(b), jnp.int32(2), reading)).mean() / K
            for w, b in zip(found.weights, betas)
        ]
        assert np.mean(skipped) == pytest.approx(rate)
    with pytest.raises(UserError, match=r"skip-rate 0\.5; allowed with max-skipped 1: up to 0\.333"):
        find_betas(found, max_skipped=1, reading="first", rate=0.5)
