"""Speculative against plain greedy decoding, token for token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from sv_jax.engine.results import RequestOutput

NEAR_TIE = 1e-3
"""Top-2 logit gap below which two float32 programs of different shape may disagree on the argmax."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first output token of a row in which plain decoding differs."""

    row: int
    index: int
    speculative_token: int | None  # None: that output ended before
    plain_token: int | None
    top2_gap: float  # of the target's logits before that token


@dataclasses.dataclass(frozen=True)
class LosslessReport:
    """How many rows are equal, and where the others first differ."""

    rows: int
    divergences: list[Divergence]
    interrupted: bool = False  # a row was compared only as far as both runs got

    @property
    def identical_rows(self) -> int:
        return self.rows - len(self.divergences)

    @property
    def lossless(self) -> bool:
        """Every divergence stands at a near-tie of the logits."""
        return all(d.top2_gap < NEAR_TIE for d in self.divergences)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None where both are equal."""
    for index, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def compare_outputs(
    speculative: Sequence[RequestOutput],
    plain: Sequence[RequestOutput],
    prompts: Sequence[Sequence[int]],
    top2_gap: Callable[[Sequence[int]], float],
) -> LosslessReport:
    """Compares row by row; an interrupted row as far as it got.

    Args:
      top2_gap: of the target's logits after a sequence of token ids.
    """
    divergences = []
    interrupted = False
    for row, (ours, reference) in enumerate(zip(speculative, plain)):
        got, expected = ours.token_ids, reference.token_ids
        if "interrupted" in (ours.finish_reason, reference.finish_reason):
            interrupted = True
            common = min(len(got), len(expected))
            got, expected = got[:common], expected[:common]
        index = first_difference(got, expected)
        if index is None:
            continue
        divergences.append(
            Divergence(
                row=row,
                index=index,
                speculative_token=got[index] if index < len(got) else None,
                plain_token=expected[index] if index < len(expected) else None,
                top2_gap=top2_gap([*prompts[row], *expected[:index]]),
            )
        )
    return LosslessReport(len(speculative), divergences, interrupted)
