"""Experts against a loop over tokens, whatever the routing; what does not count costs and changes nothing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.config import MoEConfig, UserError
from sv_jax.model.experts import ExpertWeights, Routing, run_experts, tile_size
from sv_jax.model.moe import MoE, route
from sv_jax.sharding import make_sharding
from tests.tiny import TINY, replace

E, K, D, F = 6, 2, 16, 12
MOE = MoEConfig(E, K, F, norm_topk_prob=False)
run = jax.jit(lambda *arguments: run_experts(*arguments)[0])
CONFIG = replace(TINY, hidden_size=D, moe=MOE)


@functools.cache
def weights(seed: int = 0) -> ExpertWeights:
    rng = np.random.default_rng(seed)
    shapes = (E, D, F), (E, D, F), (E, F, D)
    return ExpertWeights(*[rng.normal(size=shape).astype(np.float32) * 0.3 for shape in shapes])


def by_loop(x, experts, shares) -> np.ndarray:
    """Every token by itself, in float64."""
    y = np.zeros(x.shape)
    w = [a.astype(np.float64) for a in weights()]
    for token, (chosen, share) in enumerate(zip(experts, shares)):
        for expert, weight in zip(chosen, share):
            if expert < E:
                gate, up = x[token] @ w[0][expert], x[token] @ w[1][expert]
                y[token] += weight * ((gate / (1 + np.exp(-gate)) * up) @ w[2][expert])
    return y


def random_routing(rng, tokens: int, *, dead: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    experts = np.array([rng.permutation(E)[:K] for _ in range(tokens)], np.int32)
    experts[rng.random(tokens) < dead] = E
    return experts, rng.random((tokens, K)).astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 64, 200])
def test_against_a_loop(tokens):
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(tokens, D)).astype(np.float32)
    for experts, shares in [
        random_routing(rng, tokens),
        random_routing(rng, tokens, dead=0.5),
        (np.tile(np.array([[3, 0]], np.int32), (tokens, 1)), rng.random((tokens, K)).astype(np.float32)),
        (np.full((tokens, K), E, np.int32), np.ones((tokens, K), np.float32)),
    ]:
        got = run(x, Routing(experts, shares), weights())
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, by_loop(x, experts, shares), rtol=1e-4, atol=1e-5)


def test_few_and_many_tokens_agree():
    """The same eight tokens alone and among 300 others: other tiles, the same sums."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, D)).astype(np.float32)
    experts, shares = random_routing(rng, 300)
    assert tile_size(8, E, K) != tile_size(300, E, K)
    alone = run(x[:8], Routing(experts[:8], shares[:8]), weights())
    among = run(x, Routing(experts, shares), weights())
    np.testing.assert_allclose(alone, among[:8], rtol=1e-5, atol=1e-6)


def test_tokens_that_do_not_count_change_nothing():
    """NaN in padding and its experts' weights: real rows are the same bits; padding goes nowhere."""
    rng = np.random.default_rng(1)
    x, (experts, shares) = rng.normal(size=(64, D)).astype(np.float32), random_routing(rng, 64)
    real = np.arange(64) < 3
    experts[:3] = [[1, 2], [2, 1], [4, 1]]
    dead = Routing(np.where(real[:, None], experts, E).astype(np.int32), shares)
    expected = run(x, dead, weights())
    unread = np.array([0, 3, 5])
    poisoned = ExpertWeights(*(np.array(w) for w in weights()))
    for w in poisoned:
        w[unread] = np.nan
    got = run(np.where(real[:, None], x, np.nan), dead, poisoned)
    np.testing.assert_array_equal(np.asarray(got)[:3], np.asarray(expected)[:3])
    assert not np.asarray(expected)[3:].any()
    alone = run(x[:3], Routing(experts[:3], shares[:3]), weights())
    np.testing.assert_allclose(alone, np.asarray(expected)[:3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalised", [True, False])
def test_router(normalised):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, E)).astype(np.float32)
    live = np.array([[1, 1, 0, 1, 1], [0, 0, 0, 0, 1]], bool)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    got = route(p, MoEConfig(E, K, F, normalised), live)
    best = np.argsort(-p, axis=-1)[..., :K]
    shares = np.take_along_axis(p, best, -1)
    if normalised:
        shares /= shares.sum(-1, keepdims=True)
    assert (np.asarray(got.experts) == np.where(live[..., None], best, E)).all()
    np.testing.assert_allclose(got.weights, shares, rtol=1e-6)


def test_tiles():
    assert tile_size(8, 128, 8) == 8 and tile_size(3, 128, 8) == 3  # a verify step: one tile an active expert
    assert tile_size(256, 128, 8) == 24 and tile_size(512, 128, 8) == 40  # a mean of 16, 32
    assert tile_size(100_000, 8, 2) == 256 and tile_size(1200, 8, 2) == 160


@functools.cache
def module(mesh: tuple[int, int], shared: int = 0):
    config = replace(CONFIG, moe=MoEConfig(E, K, F, norm_topk_prob=True, shared_expert_size=shared))
    return MoE(config, "float32", make_sharding(config, mesh))


@pytest.mark.parametrize("shared", [0, 12])
def test_the_same_on_every_mesh(shared):
    """Experts live on the shards of the model axis, rows on those of the data axis."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 5, D)).astype(np.float32)
    live = np.arange(5) < np.array([5, 2, 0, 4])[:, None]
    params = module((1, 1), shared).init(jax.random.key(0), x, live)
    expected, _ = jax.jit(module((1, 1), shared).apply)(params, x, live)
    for mesh in [(2, 1), (1, 2), (4, 2), (1, 3)]:
        got, _ = jax.jit(module(mesh, shared).apply)(params, x, live)
        np.testing.assert_allclose(
            np.where(live[..., None], got, 0), np.where(live[..., None], expected, 0), atol=1e-5
        )
    assert np.abs(expected).max() > 0.1


def test_what_a_mesh_cannot_cut_is_refused():
    with pytest.raises(
        UserError, match="a model axis of 4 does not divide num_experts=6; allowed: 1, 2, 3, 6"
    ):
        make_sharding(CONFIG, (1, 4))
    shared = replace(CONFIG, moe=MoEConfig(E, K, F, False, shared_expert_size=10))
    with pytest.raises(
        UserError, match="3 does not divide shared_expert_intermediate_size=10; allowed: 1, 2"
    ):
        make_sharding(shared, (1, 3))
    mixed = replace(CONFIG, dense_ffn_layers=(1,), intermediate_size=64)
    with pytest.raises(
        UserError, match="a model axis of 3 does not divide intermediate_size=64; allowed: 1, 2"
    ):
        make_sharding(mixed, (1, 3))
    with pytest.raises(
        UserError, match="num_experts_per_tok=7 is not allowed; allowed: 1 to the number of exp"
    ):
        MoEConfig(6, 7, F, False)
