"""Temperature and filters: which tokens are left, against a sort in numpy and against transformers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.sampling_params import SamplingParams
from sv_jax.speculation.request import make_request
from sv_jax.speculation.sampling import Purpose, draw_tokens, position_keys, target_law, warp
from tests.speculation.plain_law import plain_law, plain_logits

GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product([0.3, 1.0, 1.7], [0, 1, 7, 300], [1.0, 0.95, 0.5, 0.01], [0.0, 0.05])
]


def sampling_of(params):
    return make_request([1] * len(params), [1] * len(params), sampling=params).sampling


def warped(logits, params):
    """float32[rows, V] of logits [rows, V], each row with its own params."""
    return np.asarray(jax.jit(warp)(jnp.asarray(logits, jnp.float32)[:, None], sampling_of(params)))[:, 0]


def random_logits(rows, size=1000):
    return np.random.default_rng(0).normal(0, 3, (rows, size)).astype(np.float32)


def test_random_logits_as_one_batch():
    """Rows with other settings beside them, neutral ones too, come out as if alone."""
    logits = random_logits(len(GRID))
    ours = warped(logits, GRID)
    for row, given, params in zip(ours, logits, GRID):
        expected = plain_logits(given, params)
        np.testing.assert_array_equal(np.isfinite(row), np.isfinite(expected), err_msg=str(params))
        kept = np.isfinite(row)
        np.testing.assert_allclose(row[kept], (expected - expected.max())[kept], atol=1e-4)
    laws = jax.jit(target_law)(logits[:, None], sampling_of(GRID))[:, 0]
    np.testing.assert_allclose(laws, [plain_law(*pair) for pair in zip(logits, GRID)], atol=1e-5)


@pytest.mark.parity
def test_transformers_keep_the_same_tokens():
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = random_logits(len(GRID))
    for row, given, params in zip(warped(logits, GRID), logits, GRID):
        chain = [processors.TemperatureLogitsWarper(params.temperature)]
        chain += [processors.TopKLogitsWarper(params.top_k)] if params.top_k else []
        chain += [processors.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
        chain += [processors.MinPLogitsWarper(params.min_p)] if params.min_p else []
        scores = torch.from_numpy(given[None])
        for processor in chain:
            scores = processor(None, scores)
        np.testing.assert_array_equal(np.isfinite(row), np.isfinite(scores[0].numpy()), err_msg=str(params))


INF = float("inf")
EDGES = {
    "top-k of more tokens than there are": ([1, 2, 3], {"top_k": 9}, [0, 1, 2]),
    "top-k of all": ([1, 2, 3], {"top_k": 3}, [0, 1, 2]),
    "top-k 1": ([1, 3, 2], {"top_k": 1}, [1]),
    "a tiny top-p keeps one": ([1, 3, 2], {"top_p": 1e-9}, [1]),
    "top-p that the best token has alone": ([0, 10, 0], {"top_p": 0.9}, [1]),
    "top-p just below 1": ([1, 2, 3], {"top_p": 0.9999}, [0, 1, 2]),
    "min-p 1": ([1, 3, 2, 3], {"min_p": 1.0}, [1, 3]),
    "ties at the edge of top-k": ([2, 1, 2, 3, 2], {"top_k": 2}, [0, 2, 3, 4]),
    "ties at the edge of top-p": ([1, 1, 1, 1], {"top_p": 0.3}, [0, 1, 2, 3]),
    "ties below the edge": ([3, 1, 1, 1], {"top_k": 1}, [0]),
    "removed before": ([1, -INF, 3, -INF], {"top_k": 3}, [0, 2]),
    "removed before, top-p": ([1, -INF, 3, -INF], {"top_p": 0.999}, [0, 2]),
    "one token left": ([-INF, 5, -INF], {"top_k": 2, "top_p": 0.5, "min_p": 0.5}, [1]),
    # The best two have 0.75 of all tokens, and 0.83 of the best three.
    "top-k comes before top-p": (np.log([0.45, 0.3, 0.15, 0.1]), {"top_k": 3, "top_p": 0.8}, [0, 1]),
    "temperature comes before top-p": (np.log([0.6, 0.4]), {"temperature": 0.5, "top_p": 0.65}, [0]),
    "top-p comes before min-p": (np.log([0.5, 0.3, 0.2]), {"top_p": 0.6, "min_p": 0.5}, [0, 1]),
    "logits far below 0": ([-2000, -2001, -2500], {"top_k": 2}, [0, 1]),
    "a temperature that is hardly above 0": ([30, 29, -40], {"temperature": 2e-38}, [0]),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    logits, settings, expected = EDGES[name]
    params = SamplingParams(**{"temperature": 1.0, **settings})
    row = warped([logits], [params])[0]
    assert np.flatnonzero(row > -1e30).tolist() == expected
    assert not np.isnan(row).any() and np.isfinite(plain_law(np.array(logits), params)).all()


def test_greedy_rows_beside_sampled_ones_take_the_argmax():
    """Whatever filters they carry; a division by their temperature of 0 would give NaN."""
    logits = random_logits(4)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(top_k=3, top_p=0.1),
        SamplingParams(min_p=1.0, seed=3),
    ]
    drawn = jax.jit(draw_tokens)(logits[:, None], sampling_of(params), jnp.zeros((4, 1), jnp.int32))
    greedy = [0, 2, 3]
    assert drawn[greedy, 0].tolist() == logits.argmax(-1)[greedy].tolist()
    laws = np.asarray(jax.jit(target_law)(logits[:, None], sampling_of(params)))[:, 0]
    assert (laws[greedy].max(-1) == 1).all() and (laws[greedy].argmax(-1) == logits.argmax(-1)[greedy]).all()
    assert 0 < laws[1].max() < 1


@pytest.mark.parametrize("row", [0, 1])
def test_draws_depend_on_seed_and_position_alone(row):
    """Not on the row, on how many nodes there are, or on their order; equal prompts differ by occurrence."""
    logits = np.zeros((1, 1000), np.float32)

    def draw(seeds, occurrences, positions):
        rows = len(seeds)
        sampling = make_request(
            [1] * rows,
            [1] * rows,
            sampling=[SamplingParams(temperature=1.0, seed=s) for s in seeds],
            occurrences=occurrences,
        ).sampling
        wide = jnp.broadcast_to(logits[:, None], (rows, len(positions[0]), 1000))
        return np.asarray(draw_tokens(wide, sampling, jnp.array(positions)))

    beside = draw([4, 9], [0, 0], [[5, 6, 6, 7]] * 2)
    assert beside[0, 1] == beside[0, 2]  # siblings see the same noise
    assert draw([9, 4] if row else [4, 9], [0, 0], [[5, 6, 6, 7]] * 2)[row].tolist() == beside[0].tolist()
    assert draw([4], [0], [[7, 5]])[0].tolist() == [beside[0, 3], beside[0, 0]]
    others = [beside[1, 0], draw([4], [1], [[5]])[0, 0], draw([2**32 - 1], [0], [[5]])[0, 0], beside[0, 1]]
    assert beside[0, 0] not in others and len(set(others)) == len(others)


def test_no_random_number_is_used_twice():
    """Keys of all rows, positions, purposes and siblings differ."""
    rows = [SamplingParams(seed=seed) for seed in (0, 1, 1, 2**32 - 1)]
    sampling = make_request([1] * 4, [1] * 4, sampling=rows, occurrences=[0, 0, 1, 0]).sampling
    positions = jnp.broadcast_to(jnp.arange(1000), (4, 1000))
    keys = [
        jax.random.key_data(position_keys(sampling, positions, purpose, index)).reshape(-1, 2)
        for purpose, index in itertools.product(Purpose, (0, 1, 7))
    ]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 4 * 1000 * len(keys)
