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
    next_chunk,
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
        (8193, 131_200, 16_384),
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
        assert len(buckets) <= 2 + (largest // SMALLEST_BUCKET).bit_length()
        assert all(bucket_for(slots, largest) >= slots for slots in range(largest + 1))


@pytest.mark.parametrize("k", [0, 1, 4, 7, 8, 40])
@pytest.mark.parametrize("sizes", [EMULATED_CHUNK_SIZES, *(CHUNK_SIZES[:n] for n in (1, 2, 3, 4, 5))])
def test_every_chunk_plan_covers_the_prompt_within_the_largest_bucket(k, sizes):
    for max_model_len in [*range(2, 300, 7), 511, 512, 513, 1000, 1024, 1100, 2048, 5000]:
        largest = largest_bucket(max_model_len, k + 1)
        # What next_chunk sees is the longest prompt of a batch.
        totals = {1, 2, 31, 32, 33, 127, 128, 129, 511, 512, 513, max_model_len - 2, max_model_len - 1}
        for total in (t for t in totals if 0 < t < max_model_len):
            offset, plan = 0, []
            while offset < total:
                plan.append(next_chunk(offset, total, sizes, largest))
                offset += plan[-1]
                assert offset <= largest, (max_model_len, total, plan)
            assert set(plan) <= set(sizes)
            assert offset - total < plan[-1]  # no chunk without a prompt token


def test_a_plan_takes_large_chunks_and_ends_with_a_small_one():
    small, large = CHUNK_SIZES[0], CHUNK_SIZES[-1]
    assert next_chunk(0, large + 1, CHUNK_SIZES, 4096) == large
    assert next_chunk(large, large + 1, CHUNK_SIZES, 4096) == small
    assert next_chunk(0, small, CHUNK_SIZES, 4096) == small
    # It would fit better, but not into the cache.
    assert next_chunk(4096 - small, 4096, CHUNK_SIZES, 4096) == small


def test_chunks_shrink_with_the_scores_they_need():
    assert chunk_sizes(1, 1, 512, emulated=False) == CHUNK_SIZES
    assert chunk_sizes(1, 1, 512, emulated=True) == EMULATED_CHUNK_SIZES
    for emulated in (False, True):
        assert chunk_sizes(10_000, 64, 131_072, emulated=emulated) == CHUNK_SIZES[:1]
    for slots in (512, 4096, 32_768, 131_072):
        size = chunk_sizes(4, 32, slots, emulated=False)[-1]
        assert size == CHUNK_SIZES[0] or 4 * 4 * 32 * slots * size <= SCORE_BYTES


@pytest.mark.parametrize(
    "rows, data_size, expected", [(1, 1, 1), (3, 1, 3), (0, 4, 4), (1, 4, 4), (4, 4, 4), (5, 4, 8)]
)
def test_padded_batch(rows, data_size, expected):
    assert padded_batch(rows, data_size) == expected


@pytest.mark.parametrize("value, multiple, expected", [(0, 128, 0), (1, 128, 128), (128, 128, 128)])
def test_round_up(value, multiple, expected):
    assert round_up(value, multiple) == expected
