"""Experts' products in every form: whole, ragged, sharded, in bfloat16, as the loop over tiles has them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.config import MoEConfig, UserError
from sv_jax.model.experts import (
    ExpertWeights,
    Routing,
    multiply_experts,
    run_experts,
    run_experts_ragged,
    run_experts_whole,
    run_sharded_experts,
)
from sv_jax.model.ffn import LayerChannels
from sv_jax.sharding import DATA, LOGICAL_AXES, MODEL, make_sharding
from tests.tiny import TINY, replace

E, K, D, F = 8, 2, 16, 12
tiles, whole = (jax.jit(lambda *a, run=run: run(*a)[0]) for run in (run_experts, run_experts_whole))
ragged = jax.jit(run_experts_ragged)


def make_weights() -> ExpertWeights:
    rng = np.random.default_rng(0)
    shapes = (E, D, F), (E, D, F), (E, F, D)
    return ExpertWeights(*[rng.normal(size=shape).astype(np.float32) * 0.3 for shape in shapes])


def make_inputs(*shape: int, dead: float = 0.0) -> tuple[np.ndarray, Routing]:
    """x [*shape, D] and a random routing, a share of whose tokens goes nowhere."""
    rng = np.random.default_rng(sum(shape))
    experts = np.argsort(rng.random((*shape, E)), axis=-1)[..., :K].astype(np.int32)
    experts[rng.random(shape) < dead] = E
    return rng.normal(size=(*shape, D)).astype(np.float32), Routing(
        experts, rng.random((*shape, K), np.float32)
    )


@pytest.mark.parametrize("form", [ragged, whole], ids=["ragged", "whole"])
@pytest.mark.parametrize("kind", ["all to one", "nowhere", "uneven"])
def test_other_forms_are_the_loop_over_tiles(kind, form):
    x, routing = make_inputs(70, dead=0.3)
    if kind == "all to one":
        routing.experts[:] = [[5, 2]]
    if kind == "nowhere":
        routing.experts[:] = E
    got, expected = form(x, routing, make_weights()), tiles(x, routing, make_weights())
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert (np.abs(expected).max() > 0.1) == (kind != "nowhere")


def test_padding_brings_nothing_into_ragged_products(monkeypatch):
    """Tokens that go nowhere are NaN, and products leave NaN in their rows: it goes no further."""

    def undefined_past_the_end(rows, w, group_sizes, *arguments):
        past = jnp.arange(len(rows)) >= jnp.sum(group_sizes)
        return jnp.where(past[:, None], jnp.nan, ragged_dot(rows, w, group_sizes, *arguments))

    ragged_dot = jax.lax.ragged_dot
    x, routing = make_inputs(70, dead=0.3)
    dead = (routing.experts == E).all(axis=-1)
    expected = np.asarray(ragged(x, routing, make_weights()))
    monkeypatch.setattr(jax.lax, "ragged_dot", undefined_past_the_end)
    got = jax.jit(lambda *a: run_experts_ragged(*a))(
        np.where(dead[:, None], np.nan, x), routing, make_weights()
    )
    np.testing.assert_array_equal(got, expected)
    assert 5 < dead.sum() < 65 and not expected[dead].any()


def test_all_tokens_meet_an_expert_and_only_its_own_hear_of_it():
    """NaN in tokens that go nowhere, and in experts that nobody wants."""
    x, routing = make_inputs(70, dead=0.3)
    dead = (routing.experts == E).all(axis=-1)
    routing.experts[routing.experts == 3] = E
    expected = np.asarray(whole(x, routing, make_weights()))
    poisoned = ExpertWeights(*(np.where(np.arange(E)[:, None, None] == 3, np.nan, w) for w in make_weights()))
    got = whole(np.where(dead[:, None], np.nan, x), routing, poisoned)
    np.testing.assert_array_equal(got, expected)
    assert 5 < dead.sum() < 65 and not expected[dead].any() and np.abs(expected).max() > 0.1


def test_which_products_a_platform_takes():
    def primitives(platform: str, tokens: int) -> str:
        x, routing = make_inputs(tokens)
        return str(
            jax.make_jaxpr(functools.partial(multiply_experts, platform))(x, routing, make_weights()).jaxpr
        )

    expected = {("tpu", 257): "sort ragged_dot", ("tpu", 256): "while", ("cpu", 256): "sort while"}
    for (platform, tokens), marks in expected.items():
        text = primitives(platform, tokens)
        found = [mark for mark in ("sort", "while", "ragged_dot") if re.search(rf"{mark}(_general)?\[", text)]
        assert found == marks.split(), (platform, tokens)


def test_bfloat16_experts_are_not_converted_together():
    """The loop needs one expert's weights beside the arrays that are there, not all of them in float32."""
    experts, size = 64, 64
    shapes = ((experts, size, size),) * 3
    weights = ExpertWeights(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    routing = Routing(jax.ShapeDtypeStruct((8, K), jnp.int32), jax.ShapeDtypeStruct((8, K), jnp.float32))
    compiled = tiles.lower(jax.ShapeDtypeStruct((8, size), jnp.bfloat16), routing, weights).compile()
    one_array = experts * size * size * 2
    assert compiled.memory_analysis().temp_size_in_bytes < one_array / 4


@pytest.mark.parametrize(
    ("shape", "expert_axes"),
    [(shape, axes) for shape in ((1, 2), (2, 2), (4, 2)) for axes in ((MODEL,), (DATA, MODEL))]
    + [((2, 2), (DATA,)), ((2, 2), ())],
    ids=str,
)
def test_the_same_wherever_experts_live(shape, expert_axes):
    mesh = make_sharding(TINY, shape).mesh
    x, routing = make_inputs(4, 5, dead=0.3)
    flat = Routing(*(a.reshape(20, K) for a in routing))
    expected = np.asarray(tiles(x.reshape(20, D), flat, make_weights())).reshape(x.shape)
    run = jax.jit(
        functools.partial(run_sharded_experts, mesh=mesh, batch_axes=(DATA,), expert_axes=expert_axes)
    )
    got, reads = run(x, routing, make_weights())
    assert reads is None
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert got.sharding.shard_shape(got.shape)[0] == 4 // shape[0] and np.abs(expected).max() > 0.1


@pytest.mark.parametrize("rule", ["gate", "product", "shared"])
def test_channels_inside_experts(rule):
    """Against a loop over the experts, each with its own tokens; on a mesh every shard counts its own."""
    x, routing = make_inputs(4, 5, dead=0.3)
    flat = Routing(*(a.reshape(20, K) for a in routing))
    weights = make_weights()
    channels = LayerChannels(jnp.float32(0.3), None, rule, 0.5)
    expected, counts = np.zeros((20, D)), np.zeros(4, int)
    for expert in range(E):
        tokens, ranks = np.nonzero(flat.experts == expert)
        for first in range(0, len(tokens), 8):  # tiles
            own = tokens[first : first + 8]
            rows = x.reshape(20, D)[own].astype(np.float64)
            gate, up, down = (w[expert].astype(np.float64) for w in weights)
            activated = rows @ gate / (1 + np.exp(-(rows @ gate)))
            product = activated * (rows @ up)
            kept = abs(activated if rule == "gate" else product) >= 0.3
            if rule == "shared":
                kept = np.zeros((len(own), F), bool)
                kept[:, np.argsort(-abs(activated).sum(0))[: F // 2]] = True
            share = flat.weights[own, ranks[first : first + 8]][:, None]
            np.add.at(expected, own, share * (np.where(kept, product, 0) @ down))
            counts += [kept.sum(), kept.size, kept.any(0).sum(), F]
    got, reads = jax.jit(run_experts)(x.reshape(20, D), flat, weights, channels)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert [int(n) for n in reads] == counts.tolist() and 0 < counts[0] < counts[1]
    got, reads = jax.jit(run_experts_whole)(x.reshape(20, D), flat, weights, channels)
    if rule != "shared":  # the tile whose tokens share is larger
        np.testing.assert_allclose(got, expected, atol=1e-4)
        assert [int(n) for n in reads[:2]] == counts[:2].tolist()
    mesh = make_sharding(TINY, (2, 2)).mesh
    run = functools.partial(run_sharded_experts, mesh=mesh, batch_axes=(DATA,), expert_axes=(MODEL,))
    got, reads = jax.jit(run)(x, routing, weights, channels)
    assert reads.used <= reads.most_used == counts[1]
    if rule != "shared":  # there each device's tokens have a set of their own
        np.testing.assert_allclose(got.reshape(20, D), expected, atol=1e-4)
        assert reads.used == counts[0]


def test_experts_over_both_axes_have_to_divide_by_all_devices(monkeypatch):
    config = replace(TINY, hidden_size=D, moe=MoEConfig(E, K, F, norm_topk_prob=True))
    monkeypatch.setitem(LOGICAL_AXES, "experts", (DATA, MODEL))
    sharding = make_sharding(config, (4, 2))
    assert sharding.mesh_axes("experts") == (DATA, MODEL) and sharding.mesh_axes("all_experts") == ()
    cut = sharding.named("experts", None, None).shard_shape((E, D, F))
    assert cut == (1, D, F)
    six = replace(config, moe=MoEConfig(6, K, F, norm_topk_prob=True))
    with pytest.raises(UserError, match="a mesh of 2x2 = 4 devices does not divide num_experts=6; allowed: "):
        make_sharding(six, (2, 2))
    monkeypatch.undo()
    make_sharding(six, (2, 2))
