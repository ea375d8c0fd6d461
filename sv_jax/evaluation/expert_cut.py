"""How the channels of a dense feed-forward network are dealt out to experts, and the router that finds them.

Plain numpy, no draws: the same inputs give the same cut. Shapes: N tokens, d hidden size, F channels, S of
which are shared, E experts. The energy of channel j at a token is |h_j * down_j|^2, h = silu(gate x) * up x:
how much would be missing from the layer's output, were the channel alone left out.

1. The S channels with the most energy are shared; the others are clustered by co-activation.
2. A linear router is fitted to the experts' outputs (ridge regression on their log-norms).
3. Channels change places so that the router's own choice of k experts has the most energy in it; the shared
   channels, which are always chosen, take part. Steps 2 and 3 take turns.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

PENALTY = 1e-3  # of the ridge regression, relative to the mean eigenvalue of x^T x
FLOOR = 1e-2  # of the mean norm: the logarithm of an expert that does nothing is not minus infinity
HARDLY = 1e-9  # relative gain below which an exchange is rounding


@dataclasses.dataclass(frozen=True)
class CutShape:
    """num_shared: S. num_experts: E. selected: k, experts per token that channels are arranged for.
    rounds: turns of router and exchange."""

    num_shared: int
    num_experts: int
    selected: int
    rounds: int

    @property
    def always(self) -> int:
        """The label of shared channels; experts' are 0 .. E - 1."""
        return self.num_experts


class LayerCut(NamedTuple):
    """channels: int64[F], S shared ones, then expert by expert, ascending within each.
    router: float32[E, d]; its logits have a standard deviation of 1 over the tokens of the fit."""

    channels: np.ndarray
    router: np.ndarray


def scaled_activations(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """float32[F, N]: h_j times the norm of down_j. x [N, d]; gate, up [F, d]; down [d, F]."""
    gated = gate @ x.T
    gated /= 1 + np.exp(-gated)
    gated *= up @ x.T
    gated *= np.linalg.norm(down, axis=0)[:, None]
    return gated


def similarity(activations: np.ndarray) -> np.ndarray:
    """[F, F]: the cosine of |activation| over tokens for each pair of channels; activations [F, N]."""
    size = np.abs(activations)
    size /= np.maximum(np.linalg.norm(size, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return size @ size.T


def balanced_clusters(similar: np.ndarray, count: int, *, passes: int = 400) -> np.ndarray:
    """Clusters of equal size with much similarity inside of them.

    Grown greedily, one after the other, then improved by exchanging two members of two clusters for as long
    as that helps, at most `passes` times over all clusters.

    Args:
      similar: symmetric [n, n]; the diagonal does not matter. count: clusters, a divisor of n.

    Returns:
      int64[n]: the cluster of each, 0 .. count - 1.
    """
    similar = np.array(similar, np.float64)
    np.fill_diagonal(similar, 0.0)
    labels = _grown(similar, count)
    to_cluster = np.stack([similar[:, labels == c].sum(axis=1) for c in range(count)], axis=1)
    for _ in range(passes):
        moved = to_cluster - to_cluster[np.arange(len(labels)), labels][:, None]
        # Both leave each other behind: what they had to do with one another counts in neither cluster.
        gains = moved[:, labels] + moved[:, labels].T - 2 * similar
        gains[labels[:, None] == labels[None]] = -np.inf
        # Sums to the clusters change with an exchange: a cluster takes part in one a pass.
        touched: set[int] = set()
        for i, j in _best_first(gains, HARDLY * np.abs(to_cluster).max()):
            a, b = int(labels[i]), int(labels[j])
            if touched.isdisjoint((a, b)):
                touched |= {a, b}
                labels[i], labels[j] = b, a
                to_cluster[:, a] += similar[:, j] - similar[:, i]
                to_cluster[:, b] += similar[:, i] - similar[:, j]
        if not touched:
            break
    return labels


def _grown(similar: np.ndarray, count: int) -> np.ndarray:
    """Each cluster begins with what is most similar to all that is left, and takes in its nearest."""
    labels = np.full(len(similar), -1)
    for cluster in range(count):
        score = similar[:, labels < 0].sum(axis=1)
        for member in range(len(similar) // count):
            best = int(np.argmax(np.where(labels < 0, score, -np.inf)))
            labels[best] = cluster
            score = similar[best].copy() if member == 0 else score + similar[best]
    return labels


def _best_first(gains: np.ndarray, least: float) -> list[tuple[int, int]]:
    """For each i the best partner j, those above `least`, best first."""
    partners = gains.argmax(axis=1)
    best = gains[np.arange(len(gains)), partners]
    return [(int(i), int(partners[i])) for i in np.argsort(-best, kind="stable") if best[i] > least]


def exchange(value: np.ndarray, labels: np.ndarray, *, passes: int = 400) -> np.ndarray:
    """Labels among which no two items can change places for more value; as many of each label as before.

    Args:
      value: [n, labels], of an item under each label; the sum over items is what grows.
      labels: int[n], where the items start. passes: at most so many over all items.
    """
    labels = labels.copy()
    rows = np.arange(len(labels))
    for _ in range(passes):
        moved = value - value[rows, labels][:, None]
        gains = moved[:, labels] + moved[:, labels].T
        touched: set[int] = set()
        for i, j in _best_first(gains, HARDLY * float(np.abs(value).max())):
            if touched.isdisjoint((i, j)):
                touched |= {i, j}
                labels[i], labels[j] = labels[j], labels[i]
        if not touched:
            break
    return labels


def ridge(x: np.ndarray, y: np.ndarray, penalty: float = PENALTY) -> np.ndarray:
    """float32[d, m]: the W that minimises |x W - y|^2 + penalty * trace(x^T x) / d * |W|^2.

    x: [N, d]. y: [N, m].
    """
    gram = (x.T @ x).astype(np.float64)
    gram[np.diag_indices(len(gram))] += penalty * np.trace(gram) / len(gram)
    return np.linalg.solve(gram, (x.T @ y).astype(np.float64)).astype(np.float32)


def expert_norms(activations: np.ndarray, down: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """float32[N, E]: the norm of each expert's output. activations: scaled ones [F, N]; down [d, F]."""
    unit = down / np.linalg.norm(down, axis=0)
    squares = []
    for expert in range(count):
        members = np.flatnonzero(labels == expert)
        ours, directions = activations[members], unit[:, members]
        # |U a|^2 = a . (U^T U) a: the outputs themselves are much larger.
        squares.append(np.einsum("jn,jn->n", ours, (directions.T @ directions) @ ours))
    return np.sqrt(np.maximum(np.stack(squares, axis=1), 0.0))


def fit_router(x: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """float32[E, d]: logits that rank the experts of a token as their log-norms do.

    What all experts of a token have in common plays no part in the ranking and is taken out first. There is
    no intercept, which Qwen2-MoE's router lacks: normed inputs have so much in common that one is not missed.
    """
    logs = np.log(norms + FLOOR * norms.mean())
    weights = ridge(x, logs - logs.mean(axis=1, keepdims=True))
    return (weights / np.std(x @ weights)).T


def selected_experts(logits: np.ndarray, count: int) -> np.ndarray:
    """bool[N, E]: the `count` largest logits of each token; the first of equal ones."""
    order = np.argsort(-logits, axis=1, kind="stable")
    chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(chosen, order[:, :count], True, axis=1)
    return chosen


def cut_layer(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, shape: CutShape) -> LayerCut:
    """The cut of one layer, from its normed inputs x float32[N, d]; gate, up [F, d]; down [d, F]."""
    activations = scaled_activations(x, gate, up, down)
    energy = np.square(activations)
    routed = np.sort(np.argsort(-energy.sum(axis=1), kind="stable")[shape.num_shared :])
    labels = np.full(len(gate), shape.always)
    # Half of the tokens say as much about which channels go together.
    labels[routed] = balanced_clusters(similarity(activations[routed, ::2]), shape.num_experts)
    for _ in range(shape.rounds):
        router = fit_router(x, expert_norms(activations, down, labels, shape.num_experts))
        chosen = selected_experts(x @ router.T, shape.selected)
        there = np.concatenate([chosen, np.ones((len(x), 1), bool)], axis=1).astype(np.float32)
        better = exchange(energy @ there, labels)
        if np.array_equal(better, labels):
            break
        labels = better
    router = fit_router(x, expert_norms(activations, down, labels, shape.num_experts))
    groups = [np.flatnonzero(labels == label) for label in (shape.always, *range(shape.num_experts))]
    return LayerCut(np.concatenate(groups), router)


def labels_of(channels: np.ndarray, num_shared: int, num_experts: int) -> np.ndarray:
    """int64[F]: the expert of each channel, `num_experts` for shared ones, of a `LayerCut`'s channels."""
    labels = np.full(len(channels), num_experts)
    for expert, members in enumerate(channels[num_shared:].reshape(num_experts, -1)):
        labels[members] = expert
    return labels
