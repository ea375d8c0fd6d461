"""Tree masks, depths and paths written out as literal matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.speculation.tree import ancestor_mask, node_depths, path_to

CASES = {
    "root alone": ([-1], [[1]], [0]),
    "chain": (
        [-1, 0, 1, 2],
        [
            [1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 1],
        ],
        [0, 1, 2, 3],
    ),
    "two branches": (
        [-1, 0, 0, 1, 2],
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 0, 1, 0, 0],
            [1, 1, 0, 1, 0],
            [1, 0, 1, 0, 1],
        ],
        [0, 1, 1, 2, 2],
    ),
    "siblings below a leaf": (
        [-1, 0, 1, 1, 1],
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 0, 1, 0],
            [1, 1, 0, 0, 1],
        ],
        [0, 1, 2, 2, 2],
    ),
    "empty slots": (
        [-1, 0, -1, -1],
        [
            [1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 0, 1],
        ],
        [0, 1, 0, 0],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_and_depths(name):
    parents, expected, depths = CASES[name]
    mask = ancestor_mask(jnp.array([parents]))
    np.testing.assert_array_equal(mask[0], np.array(expected, bool))
    np.testing.assert_array_equal(node_depths(mask)[0], depths)


@pytest.mark.parametrize("num_nodes", range(1, 18))
def test_long_chains_reach_the_root(num_nodes):
    """The number of squarings is right at and around each power of two."""
    mask = ancestor_mask(jnp.arange(num_nodes)[None] - 1)
    np.testing.assert_array_equal(mask[0], np.tri(num_nodes, dtype=bool))


def test_rows_have_their_own_trees():
    parents = [CASES[name][0] for name in ("chain", "empty slots")]
    mask = ancestor_mask(jnp.array(parents))
    np.testing.assert_array_equal(mask[0], np.array(CASES["chain"][1], bool))
    np.testing.assert_array_equal(mask[1], np.array(CASES["empty slots"][1], bool))


def test_paths():
    mask = ancestor_mask(jnp.array([CASES["two branches"][0]] * 4))
    paths = path_to(mask, jnp.array([0, 2, 3, 4]))
    for row, expected in zip(np.asarray(paths), ([0], [0, 2], [0, 1, 3], [0, 2, 4])):
        assert row[: len(expected)].tolist() == expected
        assert ((row >= 0) & (row < 5)).all()
