"""Which static sizes a request runs in: cache buckets and prefill chunks. Pure arithmetic."""

from __future__ import annotations

SMALLEST_BUCKET = 512
BUCKET_MULTIPLE = 128  # every cache capacity is a multiple: whole blocks of any allowed block size
CHUNK_SIZES = (32, 64, 128, 256, 512)
EMULATED_CHUNK_SIZES = (32, 128)
SCORE_BYTES = 512 << 20  # float32 attention scores that one prefill chunk may take on one device


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def largest_bucket(max_model_len: int, num_nodes: int) -> int:
    """Slots that a full context needs: a step writes num_nodes slots at a row's length."""
    return round_up(max_model_len + num_nodes, BUCKET_MULTIPLE)


def bucket_for(slots: int, largest: int) -> int:
    """The smallest bucket (512, 1k, 2k, .. or the largest) with at least `slots` slots."""
    if slots > largest:
        raise ValueError(f"{slots} slots do not fit the largest bucket of {largest}")
    bucket = SMALLEST_BUCKET
    while bucket < slots:
        bucket *= 2
    return min(bucket, largest)


def chunk_sizes(rows: int, heads: int, slots: int, *, emulated: bool) -> tuple[int, ...]:
    """Sizes of prefill chunks whose scores [rows, heads, chunk, slots] stay within SCORE_BYTES, ascending.

    Args:
      rows, heads: per device. slots: cache bucket that the prompt ends in.
      emulated: several devices share this host's cores. Chunks stay small then: every device waits in
        each collective for all the others to finish the same part. And they are few: a program for eight
        devices takes longer to compile, or to load, than some padding to run.
    """
    limit = SCORE_BYTES // (4 * rows * heads * slots)
    sizes = EMULATED_CHUNK_SIZES if emulated else CHUNK_SIZES
    return tuple(size for size in sizes if size <= limit) or sizes[:1]


def next_chunk(offset: int, total: int, sizes: tuple[int, ...], capacity_limit: int) -> int:
    """Size of the chunk that starts at `offset` of prompts with up to `total` tokens.

    The smallest size that holds what is left, or the largest there is, as far as it fits the largest cache.
    """
    allowed = [size for size in sizes if offset + size <= capacity_limit]
    return next((size for size in allowed if size >= total - offset), allowed[-1])
