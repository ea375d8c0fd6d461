"""Capacity against a plain loop; whatever goes nowhere takes none of it."""

import jax
import numpy as np
import pytest

from sv_jax.model.capacity import drop_beyond_capacity, expert_capacity
from sv_jax.model.experts import Routing

E, K = 6, 2
drop = jax.jit(drop_beyond_capacity, static_argnums=1)


def make_routing(*shape: int, dead: float = 0.0) -> Routing:
    rng = np.random.default_rng(sum(shape))
    experts = np.argsort(rng.random((*shape, E)), axis=-1)[..., :K].astype(np.int32)
    experts[rng.random(shape) < dead] = E
    return Routing(experts, rng.random((*shape, K), np.float32))


def by_loop(routing: Routing, capacity: int) -> tuple[np.ndarray, int]:
    """First come, first served."""
    experts, taken, dropped = routing.experts.copy(), [0] * E, 0
    for index in np.ndindex(experts.shape):
        expert = experts[index]
        if expert == E:
            continue
        if taken[expert] < capacity:
            taken[expert] += 1
        else:
            experts[index], dropped = E, dropped + 1
    return experts, dropped


@pytest.mark.parametrize("shape", [(1,), (17,), (3, 8)])
def test_against_a_loop(shape):
    for dead in (0.0, 0.5):
        routing = make_routing(*shape, dead=dead)
        for capacity in (0, 1, 3, 100):
            got, dropped = drop(routing, E, capacity)
            experts, expected = by_loop(routing, capacity)
            np.testing.assert_array_equal(got.experts, experts)
            np.testing.assert_array_equal(got.weights, routing.weights)
            assert dropped == expected and dropped.dtype == np.int32


def test_all_tokens_to_one_expert():
    routing = Routing(np.tile(np.array([[3, 0]], np.int32), (20, 1)), np.ones((20, K), np.float32))
    capacity = expert_capacity(1.0, routing, E)
    assert capacity == 7  # ceil(20 * 2 / 6)
    got, dropped = drop(routing, E, capacity)
    assert dropped == 2 * (20 - 7)
    np.testing.assert_array_equal(got.experts, [[3, 0]] * 7 + [[E, E]] * 13)


def test_one_token_more_than_there_is_room_for_loses_one_pair():
    """Choices of one token count in the order of their ranks, also if both are the same expert."""
    routing = Routing(np.array([[1, 2], [1, 1], [4, 1]], np.int32), np.ones((3, K), np.float32))
    got, dropped = drop(routing, E, 2)
    assert dropped == 2
    np.testing.assert_array_equal(got.experts, [[1, 2], [1, E], [4, E]])


def test_padding_takes_no_capacity():
    """Padding before, between and behind real tokens: the limit and who keeps a place stay the same."""
    routing = make_routing(12)
    places = np.array([3, 4, 5, 9, 10, 15, 16, 17, 18, 30, 31, 39])
    padded = Routing(np.full((40, K), E, np.int32), np.ones((40, K), np.float32))
    padded.experts[places] = routing.experts
    capacity = expert_capacity(0.75, routing, E)
    assert capacity == expert_capacity(0.75, padded, E) == 3
    (alone, lost), (among, lost_among) = drop(routing, E, capacity), drop(padded, E, capacity)
    np.testing.assert_array_equal(np.asarray(among.experts)[places], alone.experts)
    assert lost == lost_among > 0


def test_capacity_is_exact():
    """80 pairs of 1.1 are 88, not 89: no rounding error turns into a token."""
    routing = Routing(np.zeros((80, 1), np.int32), np.ones((80, 1), np.float32))
    assert expert_capacity(1.1, routing, 1) == 88
    assert [int(expert_capacity(f, make_routing(9), E)) for f in (0.5, 1.0, 1.25, 2.0)] == [2, 3, 4, 6]
    assert expert_capacity(2.0, Routing(np.full((4, K), E), np.ones((4, K))), E) == 0
