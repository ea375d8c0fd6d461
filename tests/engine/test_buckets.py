"""Buckets and chunks as tables, and chunk plans for many prompts."""

from __future__ import annotations

import pytest

from sv_jax.engine.buckets import (
    BUCKET_MULTIPLE,
    CHUNK_SIZES,
    EMULATED_CHUNK_SIZES,
    SCORE_BYTES,
    SMALLEST_BUCKET,
    bucket_for,
    chunk_sizes,
    largest_bucket,
    plan_chunks,
    round_up,
)
from sv_jax.engine.decoding import padded_batch


@pytest.mark.parametrize(
    "slots, largest, expected",
    [
        (0, 1152, 512),
        (1, 1152, 512),
        (512, 1152, 512),
        (513, 1152, 1024),
        (1024, 1152, 1024),
        (1025, 1152, 1152),
        (1152, 1152, 1152),
        (1, 128, 128),
        (128, 128, 128),
        (513, 640, 640),
        (2049, 131_200, 3072),
        (3073, 131_200, 4096),
        (8193, 131_200, 12_288),
        (12_289, 131_200, 16_384),
    ],
)
def test_bucket_for(slots, largest, expected):
    assert bucket_for(slots, largest) == expected


def test_what_does_not_fit_is_not_clamped():
    with pytest.raises(ValueError, match="1153 slots do not fit the largest bucket of 1152"):
        bucket_for(1153, 1152)


@pytest.mark.parametrize(
    "max_model_len, num_nodes, expected",
    [(2, 1, 128), (127, 1, 128), (128, 1, 256), (120, 8, 128), (121, 8, 256), (8192, 8, 8320)],
)
def test_largest_bucket(max_model_len, num_nodes, expected):
    assert largest_bucket(max_model_len, num_nodes) == expected


def test_buckets_hold_what_they_are_chosen_for():
    for largest in range(BUCKET_MULTIPLE, 5000, BUCKET_MULTIPLE):
        buckets = {bucket_for(slots, largest) for slots in range(largest + 1)}
        assert all(bucket % BUCKET_MULTIPLE == 0 and bucket <= largest for bucket in buckets)
        # One program per bucket is compiled: there must be few.
        assert len(buckets) <= 2 + 2 * (largest // SMALLEST_BUCKET).bit_length()
        assert all(bucket_for(slots, largest) >= slots for slots in range(largest + 1))


@pytest.mark.parametrize("k", [0, 1, 4, 7, 8, 40])
@pytest.mark.parametrize("sizes", [EMULATED_CHUNK_SIZES, *(CHUNK_SIZES[:n] for n in (1, 2, 3, 4))])
def test_every_chunk_plan_covers_the_prompt_within_the_largest_bucket(k, sizes):
    for max_model_len in [*range(2, 300, 7), 511, 512, 513, 1000, 1024, 1100, 2048, 5000]:
        largest = largest_bucket(max_model_len, k + 1)
        totals = {1, 2, 31, 32, 33, 127, 128, 129, 511, 512, 513, max_model_len - 2, max_model_len - 1}
        for total in (t for t in totals if 0 < t < max_model_len):
            plan = plan_chunks(total, sizes, largest)
            offset = sum(plan)
            assert offset <= largest, (max_model_len, total, plan)
            assert set(plan) <= set(sizes)
            assert offset - total < plan[-1]  # no chunk without a prompt token


def test_a_plan_takes_large_chunks_and_ends_with_a_small_one():
    small, large = CHUNK_SIZES[0], CHUNK_SIZES[-1]
    assert plan_chunks(2 * large + 1, CHUNK_SIZES, 4096) == [large, large, small]
    assert plan_chunks(small, CHUNK_SIZES, 4096) == [small]
    assert plan_chunks(large + small + 1, CHUNK_SIZES, 4096) == [large, CHUNK_SIZES[1]]
    # A single chunk would hold the rest, but not within the cache.
    assert plan_chunks(large + 2 * small, (small, large), large + 2 * small) == [large, small, small]
    assert plan_chunks(0, CHUNK_SIZES, 4096) == []


def test_chunks_shrink_with_the_scores_they_need():
    assert chunk_sizes(1, 1, emulated=False) == CHUNK_SIZES
    assert chunk_sizes(1, 1, emulated=True) == EMULATED_CHUNK_SIZES
    for emulated in (False, True):
        assert chunk_sizes(100_000, 64, emulated=emulated) == CHUNK_SIZES[:1]
    for rows in (4, 64, 512):
        size = chunk_sizes(rows, 32, emulated=False)[-1]
        assert size == CHUNK_SIZES[0] or 4 * rows * 32 * size**2 <= SCORE_BYTES


@pytest.mark.parametrize(
    "rows, data_size, expected", [(1, 1, 1), (3, 1, 3), (0, 4, 4), (1, 4, 4), (4, 4, 4), (5, 4, 8)]
)
def test_padded_batch(rows, data_size, expected):
    assert padded_batch(rows, data_size) == expected


@pytest.mark.parametrize("value, multiple, expected", [(0, 128, 0), (1, 128, 128), (128, 128, 128)])
def test_round_up(value, multiple, expected):
    assert round_up(value, multiple) == expected
