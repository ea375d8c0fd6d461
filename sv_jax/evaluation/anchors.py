"""The choice of anchors: which layers select blocks, when it is known what each reuse would cost (SA*)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Windows = Mapping[int, int | None]
"""Layers that may select, ascending, each with its sliding window; dense layers are not among them."""


class AnchorChoice(NamedTuple):
    cost: float  # predicted: the sum over the layers that reuse a set
    anchors: tuple[int, ...]


def allowed_pairs(windows: Windows, reach: int) -> list[tuple[int, int]]:
    """(anchor, layer) with layer - reach <= anchor < layer and one window: no others may share a set."""
    return [
        (anchor, layer)
        for layer in windows
        for anchor in windows
        if layer - reach <= anchor < layer and windows[anchor] == windows[layer]
    ]


def cost_matrix(layers: int, pairs: Sequence[tuple[int, int]], costs: Sequence[float]) -> np.ndarray:
    """float64[L, L]: [a, l] is what it costs that l reads a's set; infinite where that is not allowed."""
    matrix = np.full((layers, layers), np.inf)
    for (anchor, layer), cost in zip(pairs, costs, strict=True):
        matrix[anchor, layer] = cost
    return matrix


def best_choices(costs: np.ndarray, windows: Windows) -> dict[int, AnchorChoice]:
    """For each possible number of anchors, the ones with the exact least sum of costs.

    A layer that is no anchor reads the set of the last anchor before it among the layers of its window, as
    `plan.resolve_anchors` has it. So each window's first layer is an anchor.

    Args:
      costs: see `cost_matrix`. windows: of each layer.
    """
    total = {0: AnchorChoice(0.0, ())}
    for window in dict.fromkeys(windows.values()):
        layers = [layer for layer, own in windows.items() if own == window]
        total = _join(total, _choices_among(layers, costs))
    return {
        number: AnchorChoice(choice.cost, tuple(sorted(choice.anchors))) for number, choice in total.items()
    }


def _choices_among(layers: Sequence[int], costs: np.ndarray) -> dict[int, AnchorChoice]:
    """`best_choices` for the layers of one window, by dynamic programming over where segments end.

    A segment is an anchor and the layers up to the next one, which all read its set.
    """
    count = len(layers)
    # best[end]: of the first `end` layers, by number of segments.
    best: list[dict[int, AnchorChoice]] = [{0: AnchorChoice(0.0, ())}]
    for end in range(1, count + 1):
        ending: dict[int, AnchorChoice] = {}
        for first in range(end):
            segment = float(sum(costs[layers[first], layer] for layer in layers[first + 1 : end]))
            for number, before in best[first].items():
                cost = before.cost + segment
                if cost < (ending[number + 1].cost if number + 1 in ending else np.inf):
                    ending[number + 1] = AnchorChoice(cost, (*before.anchors, layers[first]))
        best.append(ending)
    return best[count]


def _join(one: dict[int, AnchorChoice], other: dict[int, AnchorChoice]) -> dict[int, AnchorChoice]:
    """Anchors of two windows together: the cheapest split of each number among the two."""
    joined: dict[int, AnchorChoice] = {}
    for a, first in one.items():
        for b, second in other.items():
            cost = first.cost + second.cost
            if cost < (joined[a + b].cost if a + b in joined else np.inf):
                joined[a + b] = AnchorChoice(cost, first.anchors + second.anchors)
    return joined


def choose(choices: dict[int, AnchorChoice], *, most: int, tolerated: float) -> AnchorChoice:
    """The fewest anchors, up to `most`, whose predicted cost is at most `tolerated`; else the cheapest.

    Raises ValueError where no choice has so few anchors: see `fewest_anchors`.
    """
    possible = [choices[number] for number in sorted(choices) if number <= most]
    if not possible:
        raise ValueError(f"at most {most} anchors; possible: {min(choices)} or more")
    return next((c for c in possible if c.cost <= tolerated), min(possible, key=lambda c: c.cost))


def fewest_anchors(windows: Windows, reach: int) -> int:
    """The least number of anchors with which every layer has one that is at most `reach` before it."""
    pairs = allowed_pairs(windows, reach)
    return min(best_choices(cost_matrix(max(windows) + 1, pairs, [0.0] * len(pairs)), windows))


def even_anchors(windows: Windows, number: int) -> tuple[int, ...]:
    """`number` anchors spaced as evenly as the windows allow: each window's first layer is one.

    The same number for a comparison; how far back a layer's anchor lies is not limited.
    """
    layers = list(windows)
    firsts = {next(x for x in layers if windows[x] == window) for window in set(windows.values())}
    anchors = {layers[i * len(layers) // number] for i in range(number)}
    for first in sorted(firsts - anchors):
        anchors.remove(min(anchors - firsts, key=lambda layer: abs(layer - first)))
        anchors.add(first)
    return tuple(sorted(anchors))
