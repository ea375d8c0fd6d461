"""Which experts are left out: the rules against plain loops, and what a pass says that it read."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.config import MoEConfig, UserError
from sv_jax.model.experts import Routing
from sv_jax.model.moe import count_experts, route
from sv_jax.sparsity.config import SparsityConfig
from sv_jax.sparsity.experts import (
    choose_experts,
    count_skipped,
    count_votes,
    keep_experts,
    low_shares,
    plan_experts,
    repick_experts,
    shortlist_experts,
)
from sv_jax.sparsity.ffn_config import ExpertSparsity
from sv_jax.sparsity.plan import make_plan
from tests.tiny import TINY, replace

E, K, LAYERS = 8, 4, 3
MOE = MoEConfig(E, K, 16, norm_topk_prob=True)
CONFIG = replace(TINY, moe=MOE, num_layers=LAYERS, dense_ffn_layers=(1,))
RAW = replace(CONFIG, moe=dataclasses.replace(MOE, norm_topk_prob=False))


def draw(seed: int = 0, rows: int = 2, tokens: int = 5, config=CONFIG):
    """Probabilities, and the routing of tokens the last of which counts for nothing in row 0."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(rows, tokens, E)).astype(np.float32)
    live = np.ones((rows, tokens), bool)
    live[0, -1] = False
    probabilities = jax.nn.softmax(jnp.asarray(logits))
    return probabilities, route(probabilities, config.moe, jnp.asarray(live))


def skipped_by_hand(weights, betas, most: int, reading: str) -> int:
    shares = [sum(sorted(weights)[:i]) / sum(weights) for i in range(1, len(weights))]
    passes = [share < beta and i < most for i, (share, beta) in enumerate(zip(shares, betas))]
    if reading == "largest":
        return max((i + 1 for i, ok in enumerate(passes) if ok), default=0)
    return next((i for i, ok in enumerate(passes) if not ok), len(passes))


@pytest.mark.parametrize("reading", ["first", "largest"])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_skipping_against_a_loop(reading, most):
    _, routing = draw(rows=6, tokens=30)
    medians = np.median(np.asarray(low_shares(routing.weights)).reshape(-1, K - 1), axis=0)
    found = []
    for betas in [medians, np.array([0.0, 1, 1]), np.array([1, 0, 1.0]), np.ones(3), np.zeros(3)]:
        got = np.asarray(count_skipped(routing.weights, jnp.asarray(betas), jnp.int32(most), reading))
        rows = np.asarray(routing.weights, np.float64).reshape(-1, K)
        expected = [skipped_by_hand(row, betas, most, reading) for row in rows]
        assert got.reshape(-1).tolist() == expected
        found += expected
    assert set(found) == set(range(most + 1))


def test_the_two_readings_differ():
    weights, betas = jnp.array([0.6, 0.2, 0.1, 0.1]), jnp.array([0.05, 0.3, 0.9])
    assert count_skipped(weights, betas, jnp.int32(3), "first") == 0
    assert count_skipped(weights, betas, jnp.int32(3), "largest") == 3
    assert count_skipped(weights, betas, jnp.int32(2), "largest") == 2


@pytest.mark.parametrize("config", [CONFIG, RAW], ids=["normalised", "raw"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_that_are_left(config, renormalise):
    _, routing = draw(config=config)
    kept = np.arange(K) < np.array([[4, 3, 2, 1, 4], [0, 1, 2, 3, 4]])[..., None]
    got = keep_experts(routing, jnp.asarray(kept), E, renormalise=renormalise)
    assert (np.asarray(got.experts) == np.where(kept, routing.experts, E)).all()
    before, after = (np.asarray(r.weights).sum(-1) for r in (routing, got))
    if renormalise:
        some = kept.any(-1)
        np.testing.assert_allclose(after[some], before[some], rtol=1e-6)
        assert not after[~some].any() and np.isfinite(np.asarray(got.weights)).all()
    else:
        np.testing.assert_array_equal(np.asarray(got.weights), np.where(kept, routing.weights, 0))


def test_votes_and_the_list():
    _, routing = draw(rows=3)
    votes = np.zeros(E)
    for experts, weights in zip(
        np.asarray(routing.experts).reshape(-1, K), np.asarray(routing.weights).reshape(-1, K)
    ):
        for expert, weight in zip(experts, weights):
            if expert < E:
                votes[expert] += weight
    got = count_votes(routing, E)
    np.testing.assert_allclose(got, votes, rtol=1e-5)
    assert set(np.flatnonzero(shortlist_experts(got, jnp.int32(3)))) == set(np.argsort(-votes)[:3])
    tied = shortlist_experts(jnp.array([1.0, 2, 1, 0, 1]), jnp.int32(3))
    assert np.flatnonzero(tied).tolist() == [0, 1, 2]


@pytest.mark.parametrize("config", [CONFIG, RAW], ids=["normalised", "raw"])
def test_a_new_pick_is_the_router_s_among_fewer_experts(config):
    """What is picked from a list of all experts is what the router picks."""
    probabilities, routing = draw(config=config)
    count = jnp.full(probabilities.shape[:2], K)
    everyone = repick_experts(probabilities, jnp.ones(E, bool), count, routing, renormalise=False)
    live = np.asarray(routing.experts)[..., :1] < E
    assert (np.asarray(everyone.experts) == np.asarray(routing.experts)).all()
    np.testing.assert_allclose(everyone.weights, np.where(live, routing.weights, 0), rtol=1e-5)

    listed = np.zeros(E, bool)
    listed[[1, 4, 6]] = True
    few = repick_experts(probabilities, jnp.asarray(listed), count, routing, renormalise=True)
    best = np.argsort(-np.where(listed, probabilities, 0), axis=-1)[..., :3]
    assert (np.asarray(few.experts)[..., :3] == np.where(live, best, E)).all()
    assert (np.asarray(few.experts)[..., 3] == E).all()
    before, after = (np.asarray(r.weights).sum(-1) for r in (routing, few))
    np.testing.assert_allclose(after, np.where(live[..., 0], before, 0), rtol=1e-5)


def choose(layer=0, config=CONFIG, seed=0, **fields):
    probabilities, routing = draw(seed, config=config)
    plan = plan_experts(ExpertSparsity(**fields), config)
    return routing, jax.jit(choose_experts(plan), static_argnums=0)(layer, probabilities, routing)


ALL = [
    {"experts_per_token": K},
    {"max_skipped": 3, "betas": [[0.0] * 3] * 2},
    {"shortlist": E},
    {"shortlist": E, "outside": "repick"},
    {"capacity_factor": 2 * E / K},
]


@pytest.mark.parametrize("fields", ALL)
@pytest.mark.parametrize("config", [CONFIG, RAW], ids=["normalised", "raw"])
def test_everything_kept_is_the_routing(fields, config):
    routing, got = choose(config=config, **fields)
    assert (np.asarray(got.experts) == np.asarray(routing.experts)).all()
    live = np.asarray(routing.experts)[..., :1] < E
    np.testing.assert_allclose(np.where(live, got.weights, 0), np.where(live, routing.weights, 0), rtol=1e-5)
    reads = count_experts(got, routing, E)
    assert reads.read == reads.wanted and reads.kept == reads.pairs == 9 * K


def test_weights_are_scaled_as_the_model_s_own_are():
    """Unless it is said otherwise: where the router's weights sum to 1, what is left does, too."""
    for config in (CONFIG, RAW):
        for given in (None, True, False):
            plan = plan_experts(ExpertSparsity(shortlist=2, renormalise=given), config)
            assert plan.renormalise is (config.moe.norm_topk_prob if given is None else given)


def test_a_smaller_k():
    routing, got = choose(experts_per_token=2)
    experts = np.asarray(routing.experts)
    assert (np.asarray(got.experts) == np.where(np.arange(K) < 2, experts, E)).all()


def test_betas_are_the_layer_s():
    """One list for each layer with experts: the second is of layer 2, as layer 1 has none."""
    betas = [[0.0, 0, 0], [1.0, 1, 1]]
    first, last = (choose(layer, max_skipped=2, betas=betas) for layer in (0, 2))
    assert count_experts(first[1], first[0], E).kept == 9 * K
    assert count_experts(last[1], last[0], E).kept == 9 * 2


@pytest.mark.parametrize("outside", ["truncate", "repick"])
def test_no_more_experts_than_the_list_has(outside):
    for size in range(1, E + 1):
        routing, got = choose(shortlist=size, outside=outside, seed=size)
        reads = count_experts(got, routing, E)
        assert reads.read == min(size, int(reads.wanted)) and (size > 5 or reads.kept < reads.pairs)
        experts = np.asarray(got.experts)
        assert (experts[0, -1] == E).all()  # no token
        if outside == "repick":
            assert ((experts < E).sum(-1).reshape(-1)[[0, 5]] == min(size, K)).all()
        # No expert twice.
        assert all(len(set(t[t < E])) == (t < E).sum() for t in experts.reshape(-1, K))


def test_a_capacity_drops_and_counts():
    """Nine tokens, each with four experts of eight: an even share is 4.5 tokens."""
    for factor, room in [(0.5, 3), (1.0, 5)]:
        routing, got = choose(capacity_factor=factor)
        before, after = (
            np.bincount(np.asarray(r.experts).ravel(), minlength=E + 1)[:E] for r in (routing, got)
        )
        assert after.tolist() == np.minimum(before, room).tolist()
        reads = count_experts(got, routing, E)
        assert int(reads.pairs - reads.kept) == np.maximum(before - room, 0).sum() > 0


def test_what_was_read():
    routing = Routing(jnp.array([[[0, 1], [1, 2], [E, E]]]), jnp.ones((1, 3, 2)))
    fewer = Routing(jnp.array([[[0, E], [3, 1], [E, E]]]), jnp.ones((1, 3, 2)))
    assert [int(x) for x in count_experts(fewer, routing, E)] == [3, 3, 2, 4]


def test_other_numbers_run_in_the_same_program():
    probabilities, routing = draw()
    traces = []

    @jax.jit
    def run(plan):
        traces.append(plan)
        return choose_experts(plan)(0, probabilities, routing)

    for size, m in [(2, 1), (3, 2)]:
        betas = [[0.1 * m] * 3] * 2
        run(plan_experts(ExpertSparsity(max_skipped=m, betas=betas, shortlist=size), CONFIG))
    assert len(traces) == 1


BAD = [
    ({"experts_per_token": 5}, "experts experts-per-token 5; allowed for this model: up to 4"),
    ({"max_skipped": 4, "betas": [[0.5] * 3] * 2}, "experts max-skipped 4; allowed for this model: up to 3"),
    ({"shortlist": 9}, "experts shortlist 9; allowed for this model: up to 8"),
    (
        {"max_skipped": 2, "betas": [[0.5] * 3] * 3},
        r"experts betas has 3 lists of \[3\] numbers; allowed for this model: 2 lists of 3",
    ),
    ({"max_skipped": 2, "betas": [[0.5] * 2] * 2}, r"experts betas has 2 lists of \[2\] numbers; allowed"),
]


@pytest.mark.parametrize("fields, message", BAD)
def test_what_does_not_fit_a_model(fields, message):
    with pytest.raises(UserError, match=message):
        make_plan(SparsityConfig(None, None, ExpertSparsity(**fields)), CONFIG)
    with pytest.raises(UserError, match="experts are to be left out; this llama model has none"):
        plan_experts(ExpertSparsity(shortlist=1), TINY)
