"""What the rows of a batch ask for, as the arrays that a state starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from sv_jax.sampling_params import GREEDY, INT_MAX, SamplingParams
from sv_jax.speculation.sampling import row_keys
from sv_jax.speculation.types import Sampling

EOS_MULTIPLE = 4  # every number of EOS ids up to this one has arrays of one shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """Per row, see SpeculationState. The caller places it on the devices."""

    prompt_lengths: jax.Array  # int32[B]
    min_lengths: jax.Array  # int32[B]
    limits: jax.Array  # int32[B]
    eos_ids: jax.Array  # int32[B, E]
    vocab_size: jax.Array  # int32[]
    sampling: Sampling


def make_request(
    prompt_lengths: Sequence[int],
    limits: Sequence[int],
    *,
    min_lengths: Sequence[int] | None = None,
    eos_ids: Sequence[Sequence[int]] | None = None,
    vocab_size: int = INT_MAX,
    sampling: Sequence[SamplingParams] | None = None,
    occurrences: Sequence[int] | None = None,
) -> Request:
    """Arrays of one request per row; by default greedy, and ended by the limit alone.

    Args:
      prompt_lengths: tokens; 0 makes a row that only pads the batch.
      limits: tokens of prompt and output together at which a row ends.
      min_lengths: tokens of prompt and output together before which no EOS token is emitted.
      eos_ids: per row, the tokens that end it.
      vocab_size: token ids from here on are never emitted.
      occurrences: the row's number among rows with the same prompt and seed, so that they differ.
    """
    rows = len(prompt_lengths)
    most = max([1, *(len(ids) for ids in eos_ids or [])])
    ends = np.full((rows, -(-most // EOS_MULTIPLE) * EOS_MULTIPLE), -1, np.int32)
    for row, ids in zip(ends, eos_ids or []):
        row[: len(ids)] = ids
    return Request(
        prompt_lengths=np.array(prompt_lengths, np.int32),  # type: ignore[arg-type]
        min_lengths=np.array(min_lengths or [0] * rows, np.int32),  # type: ignore[arg-type]
        limits=np.array(limits, np.int32),  # type: ignore[arg-type]
        eos_ids=ends,  # type: ignore[arg-type]
        vocab_size=np.int32(vocab_size),  # type: ignore[arg-type]
        sampling=_make_sampling(sampling or [GREEDY] * rows, occurrences or [0] * rows),
    )


def _make_sampling(rows: Sequence[SamplingParams], occurrences: Sequence[int]) -> Sampling:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(row, name) for row in rows], dtype)

    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    arrays = {name: column(name, np.float32) for name in floats}
    keys = np.asarray(row_keys(column("seed", np.uint32), np.array(occurrences, np.uint32)))
    return Sampling(top_k=column("top_k", np.int32), keys=keys, **arrays)  # type: ignore[arg-type]
