"""The choice of anchors against brute force over every set of layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sv_jax.config import UserError
from sv_jax.evaluation.anchors import (
    AnchorChoice,
    allowed_pairs,
    best_choices,
    choose,
    cost_matrix,
    even_anchors,
    fewest_anchors,
)
from sv_jax.sparsity.config import AttentionSparsity
from sv_jax.sparsity.plan import resolve_anchors
from tests import tiny

W = 16  # a window
WINDOWS = {
    "full attention": dict.fromkeys(range(8)),
    "late windows": dict.fromkeys(range(3)) | dict.fromkeys(range(3, 7), W),
    "alternating": dict(enumerate((W, None) * 4)),
    "three kinds": dict(enumerate((W, W, None, 8, W, None, 8))),
    "dense layers": {1: None, 2: None, 4: None, 5: None, 6: None, 8: None},
    "dense layers and windows": {1: W, 2: None, 3: W, 6: None, 7: W},
    "one layer": {0: None},
}


def whole(windows) -> dict[int, int | None]:
    """Windows by layer where no layer is dense."""
    return dict(enumerate(windows))


def random_costs(windows, reach, seed, *, integers=False) -> np.ndarray:
    pairs = allowed_pairs(windows, reach)
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 3, len(pairs)) if integers else rng.exponential(size=len(pairs))
    return cost_matrix(max(windows) + 1, pairs, costs)


def resolve(anchors, windows) -> dict[int, int]:
    """As a run would, without dense layers: raises UserError where a layer has no anchor."""
    layers = max(windows) + 1
    model = tiny.replace(
        tiny.TINY, num_layers=layers, sliding_windows=tuple(windows.get(layer) for layer in range(layers))
    )
    dense = tuple(layer for layer in range(layers) if layer not in windows)
    resolved = resolve_anchors(AttentionSparsity(anchors=anchors, dense_layers=dense), model)
    assert all((anchor is None) == (layer in dense) for layer, anchor in enumerate(resolved))
    return {layer: anchor for layer, anchor in enumerate(resolved) if anchor is not None}


def brute_force(costs: np.ndarray, windows) -> dict[int, float]:
    """Least cost by number of anchors, over every set of layers that a run accepts."""
    least: dict[int, float] = {}
    for number in range(1, len(windows) + 1):
        for anchors in itertools.combinations(windows, number):
            try:
                resolved = resolve(anchors, windows)
            except UserError:
                continue
            cost = sum(costs[a, layer] for layer, a in resolved.items() if a != layer)
            if cost < least.get(number, np.inf):
                least[number] = cost
    return least


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("reach", [1, 3, 8])
def test_the_least_cost_is_exact(windows, reach):
    for seed in range(4):
        costs = random_costs(windows, reach, seed, integers=seed == 0)
        found = best_choices(costs, windows)
        least = brute_force(costs, windows)
        assert found.keys() == least.keys()
        for number, (cost, anchors) in found.items():
            assert len(anchors) == number and cost == pytest.approx(least[number])
            resolved = resolve(anchors, windows)
            assert all(layer - a <= reach for layer, a in resolved.items())
            assert sum(costs[a, k] for k, a in resolved.items() if a != k) == pytest.approx(cost)
        assert min(found) == fewest_anchors(windows, reach)


def test_every_layer_an_anchor_costs_nothing():
    windows = WINDOWS["three kinds"]
    assert best_choices(random_costs(windows, 2, 0), windows)[7] == AnchorChoice(0.0, tuple(range(7)))


def test_a_layer_that_must_select_is_found():
    """As layer 18 of SmolLM2: whatever else it reads, the output suffers. Everything else hardly matters."""
    windows = dict.fromkeys(range(12))
    pairs = allowed_pairs(windows, 8)
    costs = cost_matrix(12, pairs, [0.9 if layer == 7 else 0.001 for _, layer in pairs])
    choices = best_choices(costs, windows)
    for number, choice in choices.items():
        assert 0 in choice.anchors and 7 in choice.anchors, number
        assert choice.cost == pytest.approx(0.001 * (12 - number))
    assert choose(choices, most=6, tolerated=0.02).anchors == (0, 7)  # evenly: (0, 6)


def test_the_fewest_anchors_within_the_tolerance():
    choices = {1: AnchorChoice(3.0, (0,)), 2: AnchorChoice(1.0, (0, 2)), 3: AnchorChoice(2.0, (0, 1, 2))}
    choices[4] = AnchorChoice(0.0, (0, 1, 2, 3))
    assert choose(choices, most=4, tolerated=3.0) == choices[1]
    assert choose(choices, most=4, tolerated=1.5) == choices[2]
    assert choose(choices, most=4, tolerated=0.5) == choices[4]
    assert choose(choices, most=3, tolerated=0.5) == choices[2]  # none is good enough: the best, not the most
    with pytest.raises(ValueError, match="at most 0 anchors; possible: 1 or more"):
        choose(choices, most=0, tolerated=9.0)


def test_pairs():
    assert allowed_pairs(whole((None,) * 4), 2) == [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]
    assert allowed_pairs(whole((W, None, W, None)), 2) == [(0, 2), (1, 3)]
    assert allowed_pairs(whole((W, None, None)), 1) == [(1, 2)]
    assert allowed_pairs({0: None, 2: None, 3: None}, 1) == [(2, 3)]  # layer 1 is dense: 2 is too far from 0
    assert allowed_pairs({0: None}, 8) == []


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_even_anchors_are_accepted_by_a_run(windows):
    for number in range(len(set(windows.values())), len(windows) + 1):
        anchors = even_anchors(windows, number)
        assert len(set(anchors)) == number
        resolve(anchors, windows)


def test_even_anchors():
    assert even_anchors(whole((None,) * 30), 10) == tuple(range(0, 30, 3))
    assert even_anchors(whole((None,) * 7), 3) == (0, 2, 4)
    assert even_anchors(whole((None, None, None, W, W, W)), 2) == (0, 3)
    assert even_anchors(whole((None, None, W, W, W, W)), 3) == (0, 2, 4)
    assert even_anchors({1: None, 2: None, 4: None, 5: None}, 2) == (1, 4)
