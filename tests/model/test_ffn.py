"""Channels that are left out: against plain NumPy, on one device and on a mesh."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.model.ffn import FeedForward, LayerChannels
from sv_jax.model.layers import take_channels
from sv_jax.sharding import make_sharding
from tests.tiny import TINY, replace

D, F = 16, 24
CONFIG = replace(TINY, hidden_size=D, intermediate_size=F, mlp_bias=True)


@functools.cache
def module(mesh: tuple[int, int] = (1, 1)):
    return FeedForward(CONFIG, "float32", make_sharding(CONFIG, mesh))


def setting(seed: int = 0):
    """x [B, T, D] and parameters, biases too; the last token of row 1 counts for nothing."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 5, D)).astype(np.float32)
    live = np.ones((2, 5), bool)
    live[1, -1] = False
    params = nn.meta.unbox(module().init(jax.random.key(seed), x))
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) * 0.3, params)
    return x, live, params


def parts(x, params):
    """silu(gate), up, and the kernel and bias of down."""
    p = {
        name: {k: np.asarray(v, np.float64) for k, v in leaf.items()}
        for name, leaf in params["params"].items()
    }
    gate, up = (x @ p[name]["kernel"] + p[name]["bias"] for name in ("gate", "up"))
    return gate / (1 + np.exp(-gate)), up, p["down"]["kernel"], p["down"]["bias"]


def run(x, live, params, rule: str, *, threshold: float = 0.0, keep: float = 1.0, mesh=(1, 1)):
    apply = jax.jit(module(mesh).apply)
    return apply(params, x, live, LayerChannels(jnp.float32(threshold), None, rule, keep))


@pytest.mark.parametrize("rule", ["gate", "product"])
def test_masks_of_each_token(rule):
    x, live, params = setting()
    activated, up, down, bias = parts(x, params)
    measure = activated if rule == "gate" else activated * up
    threshold = float(np.median(abs(measure)))
    kept = abs(measure) >= threshold
    got, reads = run(x, live, params, rule, threshold=threshold)
    np.testing.assert_allclose(got, np.where(kept, activated * up, 0) @ down + bias, atol=1e-4)
    counted = kept[live]
    assert [int(n) for n in reads] == [counted.sum(), 9 * F, counted.any(0).sum(), F]
    assert 0 < counted.sum() < 9 * F


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.9])
def test_a_budget_that_tokens_share(keep):
    x, live, params = setting()
    activated, up, down, bias = parts(x, params)
    count = int(np.ceil(keep * F))
    best = np.argsort(-abs(activated[live]).sum(0))[:count]
    got, reads = run(x, live, params, "shared", keep=keep)
    expected = (activated * up)[..., best] @ down[best] + bias
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert [int(n) for n in reads] == [9 * count, 9 * F, count, F]


def test_controls_of_the_budget():
    """By what no run knows before it has read up; and by votes that are given."""
    x, live, params = setting()
    activated, up, down, bias = parts(x, params)
    best = np.argsort(-abs(activated * up)[live].sum(0))[: F // 2]
    got, _ = run(x, live, params, "oracle", keep=0.5)
    np.testing.assert_allclose(got, (activated * up)[..., best] @ down[best] + bias, atol=1e-4)
    votes = np.random.default_rng(0).random(F).astype(np.float32)
    given, _ = jax.jit(module().apply)(params, x, live, LayerChannels(jnp.float32(0), votes, "shared", 0.5))
    best = np.argsort(-votes)[: F // 2]
    np.testing.assert_allclose(given, (activated * up)[..., best] @ down[best] + bias, atol=1e-4)


def test_nan_in_channels_that_are_left_out_changes_nothing():
    x, live, params = setting()
    activated, *_ = parts(x, params)
    unread = np.argsort(-abs(activated[live]).sum(0))[F // 2 :]
    expected, _ = run(x, live, params, "shared", keep=0.5)
    poisoned = jax.tree.map(np.array, params)
    poisoned["params"]["up"]["kernel"][:, unread] = np.nan
    poisoned["params"]["down"]["kernel"][unread] = np.nan
    got, _ = run(x, live, poisoned, "shared", keep=0.5)
    np.testing.assert_array_equal(got, expected)


def test_a_token_that_does_not_count_has_no_say():
    x, live, params = setting()
    changed = np.where(live[..., None], x, 100.0)
    before, after = (run(y, live, params, "shared", keep=0.3)[0] for y in (x, changed))
    np.testing.assert_array_equal(np.asarray(before)[live], np.asarray(after)[live])


@pytest.mark.parametrize("rule, keep", [("gate", 1.0), ("product", 1.0), ("shared", 1.0)])
def test_nothing_left_out_is_dense(rule, keep):
    x, live, params = setting()
    expected, nothing = jax.jit(module().apply)(params, x)
    got, reads = run(x, live, params, rule, keep=keep)
    assert nothing is None and reads.used == reads.most_used and reads.wanted == reads.held
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("rule, keep", [("gate", 1.0), ("shared", 0.5)])
def test_on_meshes(rule, keep):
    """Each shard of the model axis keeps as many of its own channels: a set that is a mesh's own."""
    x, live, params = setting()
    activated, up, down, bias = parts(x, params)
    for mesh in [(2, 1), (1, 2), (2, 4)]:
        got, reads = run(x, live, params, rule, threshold=0.1, keep=keep, mesh=mesh)
        kept = abs(activated) >= 0.1
        if rule == "shared":
            size = F // mesh[1]
            score = abs(activated[live]).sum(0).reshape(mesh[1], size)
            order = np.argsort(-score, axis=1)[:, : int(np.ceil(keep * size))]
            kept = np.zeros(F, bool)
            kept[(order + size * np.arange(mesh[1])[:, None]).reshape(-1)] = True
        np.testing.assert_allclose(got, np.where(kept, activated * up, 0) @ down + bias, atol=1e-4)
        assert int(reads.wanted) == np.broadcast_to(kept, activated.shape)[live].any(0).sum()


def test_channels_of_shards():
    x = np.arange(24).reshape(2, 12)
    chosen = np.array([[0, 3], [1, 2]], np.int32)
    assert take_channels(x, chosen, axis=1)[0].tolist() == [0, 3, 7, 8]
    assert take_channels(x.T, chosen, axis=0)[:, 1].tolist() == [12, 15, 19, 20]
    assert take_channels(x, np.array([[11, 0]]), axis=1)[0].tolist() == [11, 0]
