"""Which static sizes a request runs in: cache buckets and prefill chunks. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

SMALLEST_BUCKET = 512
BUCKET_MULTIPLE = 128  # every cache capacity is a multiple: whole blocks of any allowed block size
HALF_STEPS_FROM = 2048  # beyond it a bucket is at most 1.5 times the one before, not twice
CHUNK_SIZES = (32, 64, 128, 256)  # a chunk of 512 is slower on CPU: the scores among its own tokens
EMULATED_CHUNK_SIZES = (32, 128)
SCORE_BYTES = 512 << 20  # float32 scores among a chunk's own tokens that one device may hold


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def largest_bucket(max_model_len: int, num_nodes: int, parts: int = 1) -> int:
    """Slots that a full context needs: a step writes num_nodes slots at a row's length.

    parts: that a row is cut into; each is a multiple of BUCKET_MULTIPLE.
    """
    return round_up(max_model_len + num_nodes, BUCKET_MULTIPLE * parts)


def bucket_for(slots: int, largest: int, parts: int = 1) -> int:
    """The smallest bucket (512, 1k, 2k, 3k, 4k, 6k, 8k, .. or the largest) with at least `slots` slots.

    A step reads its bucket whole: finer buckets waste less, and are more programs to compile.
    """
    if slots > largest:
        raise ValueError(f"{slots} slots do not fit the largest bucket of {largest}")
    bucket = SMALLEST_BUCKET
    while bucket < slots:
        bucket *= 2
    if bucket > HALF_STEPS_FROM and slots <= bucket * 3 // 4:
        bucket = bucket * 3 // 4
    return min(round_up(bucket, BUCKET_MULTIPLE * parts), largest)


def chunk_sizes(rows: int, heads: int, *, emulated: bool) -> tuple[int, ...]:
    """Sizes of prefill chunks whose own scores [rows, heads, C, C] stay within SCORE_BYTES, ascending.

    Args:
      rows, heads: per device.
      emulated: several devices share this host's cores. Chunks stay small then: every device waits in
        each collective for all the others to finish the same part. And they are few: a program for eight
        devices takes longer to compile, or to load, than some padding to run.
    """
    sizes = EMULATED_CHUNK_SIZES if emulated else CHUNK_SIZES
    return tuple(size for size in sizes if 4 * rows * heads * size**2 <= SCORE_BYTES) or sizes[:1]


def plan_chunks(total: int, sizes: Sequence[int], capacity_limit: int) -> list[int]:
    """Chunks for prompts of up to `total` tokens: the largest size again and again, then the smallest that
    holds what is left, as far as it fits the largest cache."""
    plan: list[int] = []
    offset = 0
    while offset < total:
        allowed = [size for size in sizes if offset + size <= capacity_limit]
        plan.append(next((size for size in allowed if size >= total - offset), allowed[-1]))
        offset += plan[-1]
    return plan
