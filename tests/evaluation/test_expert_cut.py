"""Channels dealt out to experts: sizes, permutations, what exchanges gain, the router's regression."""

import numpy as np
import pytest

from sv_jax.evaluation.expert_cut import (
    CutShape,
    balanced_clusters,
    cut_layer,
    exchange,
    expert_norms,
    fit_router,
    labels_of,
    ridge,
    scaled_activations,
    selected_experts,
    similarity,
)

RANDOM = np.random.default_rng(0)


def inside(similar, labels):
    same = labels[:, None] == labels[None]
    return similar[same].sum() - np.trace(similar)


@pytest.mark.parametrize(("count", "size"), [(32, 32), (3, 5), (1, 7), (6, 1)])
def test_clusters_have_exactly_one_size(count, size):
    points = RANDOM.standard_normal((count * size, 4))
    labels = balanced_clusters(points @ points.T, count)
    np.testing.assert_array_equal(np.bincount(labels, minlength=count), np.full(count, size))


def test_clusters_that_are_there_are_found():
    truth = RANDOM.permutation(np.repeat(np.arange(4), 6))
    similar = (truth[:, None] == truth[None]) + 0.01 * RANDOM.standard_normal((24, 24))
    labels = balanced_clusters(similar + similar.T, 4)
    for cluster in range(4):
        assert len(set(truth[labels == cluster])) == 1


def test_no_exchange_of_two_improves_clusters():
    points = RANDOM.standard_normal((24, 3))
    similar = points @ points.T
    labels = balanced_clusters(similar, 4)
    best = inside(similar, labels)
    for i in range(24):
        for j in range(i):
            other = labels.copy()
            other[i], other[j] = labels[j], labels[i]
            assert inside(similar, other) <= best + 1e-6


def test_clusters_do_not_depend_on_the_diagonal_nor_on_chance():
    points = RANDOM.standard_normal((24, 3))
    first = balanced_clusters(points @ points.T, 4)
    np.testing.assert_array_equal(first, balanced_clusters(points @ points.T + 9 * np.eye(24), 4))


def test_an_exchange_keeps_sizes_and_ends_where_no_two_gain():
    value = RANDOM.random((20, 3))
    start = np.repeat([0, 1, 2], [4, 6, 10])
    labels = exchange(value, start)
    np.testing.assert_array_equal(np.bincount(labels), [4, 6, 10])
    rows = np.arange(20)
    assert value[rows, labels].sum() > value[rows, start].sum()
    for i in range(20):
        for j in range(i):
            gain = value[i, labels[j]] + value[j, labels[i]] - value[i, labels[i]] - value[j, labels[j]]
            assert gain <= 1e-6


def test_ridge_is_least_squares_with_the_penalty_as_more_rows():
    x, y = RANDOM.standard_normal((50, 7)), RANDOM.standard_normal((50, 3))
    weight = 0.2 * np.trace(x.T @ x) / 7
    rows = np.concatenate([x, np.sqrt(weight) * np.eye(7)]), np.concatenate([y, np.zeros((7, 3))])
    np.testing.assert_allclose(ridge(x, y, 0.2), np.linalg.lstsq(*rows)[0], atol=1e-6)
    np.testing.assert_allclose(ridge(x, y, 0.0), np.linalg.lstsq(x, y)[0], atol=1e-6)


def test_a_router_ranks_what_is_linear_in_its_input():
    x = RANDOM.standard_normal((400, 8)).astype(np.float32)
    truth = RANDOM.standard_normal((8, 4)).astype(np.float32)
    router = fit_router(x, np.exp(x @ truth))
    logits = x @ router.T
    assert logits.std() == pytest.approx(1.0, abs=1e-3)
    assert (logits.argmax(axis=1) == (x @ truth).argmax(axis=1)).mean() > 0.9


def test_selected_experts_of_equal_logits_are_the_first():
    logits = np.array([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(selected_experts(logits, 2), [[False, True, True], [True, True, False]])


def test_similarity_is_a_cosine_even_of_a_silent_channel():
    similar = similarity(np.array([[1.0, 1.0], [-2.0, 2.0], [0.0, 0.0]], np.float32))
    np.testing.assert_allclose(similar[:2, :2], 1.0, rtol=1e-6)
    assert not similar[2].any()


def test_norms_are_those_of_the_experts_outputs():
    x, gate, up, down = layer()
    labels = RANDOM.permutation(np.repeat(np.arange(5), [6, 6, 6, 6, 8]))  # the last one is shared
    gated, norms = x @ gate.T, expert_norms(scaled_activations(x, gate, up, down), down, labels, 4)
    h = gated / (1 + np.exp(-gated)) * (x @ up.T)
    for expert in range(4):
        output = h[:, labels == expert] @ down[:, labels == expert].T
        np.testing.assert_allclose(norms[:, expert], np.linalg.norm(output, axis=1), rtol=1e-4)


SHAPE = CutShape(num_shared=8, num_experts=4, selected=2, rounds=3)


def layer(tokens=300, d=12, channels=32):
    shapes = ((tokens, d), (channels, d), (channels, d), (d, channels))
    return [RANDOM.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_the_cut_of_a_layer_is_a_permutation_and_does_not_change():
    inputs = layer()
    cut = cut_layer(*inputs, SHAPE)
    np.testing.assert_array_equal(np.sort(cut.channels), np.arange(32))
    assert cut.router.shape == (4, 12) and cut.router.dtype == np.float32
    labels = labels_of(cut.channels, 8, 4)
    np.testing.assert_array_equal(np.bincount(labels), [6, 6, 6, 6, 8])
    again = cut_layer(*inputs, SHAPE)
    np.testing.assert_array_equal(again.channels, cut.channels)
    np.testing.assert_array_equal(again.router, cut.router)


def test_turns_of_router_and_channels_keep_more_energy():
    x, *weights = layer(tokens=600)
    energy = np.square(scaled_activations(x, *weights))

    def kept(rounds):
        cut = cut_layer(x, *weights, CutShape(8, 4, 2, rounds))
        chosen = selected_experts(x @ cut.router.T, 2)
        there = np.concatenate([chosen, np.ones((len(x), 1), bool)], axis=1)
        return (energy.T * there[:, labels_of(cut.channels, 8, 4)]).sum()

    assert kept(4) > kept(0)
