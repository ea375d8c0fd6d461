"""The estimate of attention that the score "mass" ranks blocks by: against loops, and against attention."""

import jax
import numpy as np
import pytest

from sv_jax.evaluation.selectors import block_masses
from sv_jax.sparsity import selection
from sv_jax.sparsity.selection import attention_mass, score_blocks
from sv_jax.sparsity.summaries import KEYS_PER_MEAN, summarise
from tests.sparsity.plain_selection import plain_summary

BATCH, TOKENS, KV_HEADS, GROUP, DIM, BLOCK, CAPACITY = 4, 3, 2, 3, 8, 16, 96
LENGTHS = np.array([96, 41, 7, 0], np.int32)
NODES = np.array([[1, 1, 1], [1, 0, 1], [1, 0, 0], [1, 1, 1]], bool)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    q = 2 * rng.normal(size=(BATCH, TOKENS, KV_HEADS * GROUP, DIM)).astype(np.float32)
    keys = rng.normal(size=(BATCH, KV_HEADS, CAPACITY, DIM)).astype(np.float32)
    return q, keys


def fine_means(keys):
    """What is kept beside the cache for keys [B, K, S, D]."""
    alive = (np.arange(CAPACITY) < LENGTHS[:, None]).reshape(BATCH, -1, BLOCK)
    blocks = keys.reshape(BATCH, KV_HEADS, -1, BLOCK, DIM)
    return jax.vmap(lambda k, a: summarise(k, a, ("fine_means",)))(blocks, alive)["fine_means"]


def plain_mass(q, keys, length, nodes, window=None):
    """By definition, for one row: [K, S / BLOCK]."""
    oldest = 0 if window is None else max(length - (window - 1), 0)
    mass = np.zeros((KV_HEADS, CAPACITY // BLOCK))
    means = plain_summary("mean", keys, length, KEYS_PER_MEAN)
    for token in np.flatnonzero(nodes):
        for head in range(KV_HEADS * GROUP):
            own = head // GROUP
            weights = []
            for n in range(CAPACITY // KEYS_PER_MEAN):
                count = len(range(max(n * KEYS_PER_MEAN, oldest), min((n + 1) * KEYS_PER_MEAN, length)))
                weights.append(count * np.exp(q[token, head] @ means[own, n] / np.sqrt(DIM)))
            for n, weight in enumerate(weights):
                if sum(weights):
                    mass[own, n * KEYS_PER_MEAN // BLOCK] += weight / sum(weights)
    return mass


def test_a_window(inputs):
    """Weights are shared among what is in it; of a mean that lies across its edge, by the keys inside."""
    q, keys = inputs
    for window in (1, 20, 33, 1000):
        got = np.asarray(attention_mass(q, fine_means(keys), LENGTHS, NODES, BLOCK, window))
        expected = [plain_mass(*row, window) for row in zip(q, keys, LENGTHS, NODES)]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_the_oracle_in_a_window(inputs):
    """The dense pass's masses, from keys outside of the window none."""
    q, keys = inputs
    options = {"block_size": BLOCK, "window": 20}
    masses = np.asarray(block_masses(q, (keys, keys), LENGTHS, NODES, **options))
    assert np.allclose(masses.sum(axis=-1)[:3], [[9, 9], [6, 6], [3, 3]], atol=1e-4)
    assert (masses[0, :, :4] == 0).all() and (masses[0, :, 4:] > 0).all()  # 77 .. 95 are seen
    far = np.where((np.arange(CAPACITY) < 77)[:, None], 50 * keys, keys)
    np.testing.assert_allclose(
        block_masses(q, (far, far), LENGTHS, NODES, **options)[0], masses[0], rtol=1e-5
    )


def test_by_definition(inputs):
    """Full and partly filled blocks, none at all; empty slots of the draft say nothing."""
    q, keys = inputs
    got = np.asarray(jax.jit(attention_mass, static_argnums=4)(q, fine_means(keys), LENGTHS, NODES, BLOCK))
    expected = [plain_mass(*row) for row in zip(q, keys, LENGTHS, NODES)]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    assert np.allclose(got.sum(axis=-1), [[9, 9], [6, 6], [3, 3], [0, 0]], atol=1e-4)  # a token and head is 1


def test_the_query_heads_of_a_wide_step_in_turns(inputs, monkeypatch):
    q, keys = inputs
    at_once = attention_mass(q, fine_means(keys), LENGTHS, NODES, BLOCK, 33)
    monkeypatch.setattr(selection, "MASS_ROWS", GROUP * TOKENS - 1)
    jaxpr = str(jax.make_jaxpr(lambda *a: attention_mass(*a, BLOCK))(q, fine_means(keys), LENGTHS, NODES))
    assert f"length={GROUP}" in jaxpr and f",{GROUP * TOKENS},{CAPACITY // KEYS_PER_MEAN}]" not in jaxpr
    in_turns = attention_mass(q, fine_means(keys), LENGTHS, NODES, BLOCK, 33)
    np.testing.assert_allclose(in_turns, at_once, rtol=1e-5, atol=1e-6)


def test_it_is_attention_where_the_keys_of_a_mean_are_alike(inputs):
    """Then nothing is lost by the mean; random keys, where much is, lie far off: the tolerance can tell."""
    q, keys = inputs
    alike = np.repeat(keys[:, :, ::KEYS_PER_MEAN], KEYS_PER_MEAN, axis=2)

    def exact(keys):
        return np.asarray(block_masses(q, (keys, keys), LENGTHS, NODES, block_size=BLOCK))

    np.testing.assert_allclose(
        attention_mass(q, fine_means(alike), LENGTHS, NODES, BLOCK), exact(alike), rtol=1e-4, atol=1e-6
    )
    assert np.abs(attention_mass(q, fine_means(keys), LENGTHS, NODES, BLOCK) - exact(keys)).max() > 0.1


def test_what_is_dead_says_nothing(inputs):
    q, keys = inputs
    dead = np.arange(CAPACITY) >= LENGTHS[:, None]
    poisoned = np.where(dead[:, None, :, None], np.nan, keys)
    empty = np.where(NODES[:, :, None, None], q, 1e4)  # large, not NaN: an empty slot's query is finite
    got, expected = (
        score_blocks("mass", queries, {"fine_means": fine_means(k)}, LENGTHS, NODES, BLOCK)
        for queries, k in [(empty, poisoned), (q, keys)]
    )
    np.testing.assert_array_equal(got, expected)
