"""What a user may ask of sparse feed-forward networks and sparse experts: checked numbers. No JAX.

[ffn]                  # SFFN
rule = "gate"
thresholds = [0.05]    # one for all layers, or one a layer

[experts]              # SMoE, or one of what we put beside it
max-skipped = 3
betas = [[0.05, ..], ..]   # a list a layer, of k - 1 numbers
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sv_jax.config import Range, UserError, check_layers

CHANNEL_RULES = ("gate", "product", "shared")
READINGS = ("first", "largest")
OUTSIDE = ("truncate", "repick")
INT_MAX = 2**31 - 1

_COUNT = Range(int, lambda value: 1 <= value <= INT_MAX, "a whole number of at least 1")
THRESHOLD = Range(float, lambda value: value >= 0, "a number of at least 0")
KEEP = Range(float, lambda value: 0 < value <= 1, "a number above 0, up to 1")
BETA = Range(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
EXPERT_RANGES: dict[str, Range] = {
    "experts_per_token": _COUNT,
    "max_skipped": _COUNT,
    "shortlist": _COUNT,
    "capacity_factor": Range(float, lambda value: 0 < value <= 1000, "a number above 0, up to 1000"),
}


def _choice(label: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{label} {value!r} is not allowed; allowed: {', '.join(allowed)}")


def _numbers(label: str, values: Any, limits: Range) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or not values:
        raise UserError(f"{label} {values!r} is not allowed; allowed: a list of numbers")
    return tuple(limits.check(f"{label}: entry {i}", value) for i, value in enumerate(values))


@dataclasses.dataclass(frozen=True)
class ChannelSparsity:
    """Sparse feed-forward networks (SFFN of arXiv 2512.21911, and two rules of ours). Lossy.

    rule: "gate" (the paper) and "product" leave out of each token the channels below a threshold, which saves
      arithmetic and no bytes here; "shared" keeps of all tokens of a step together the share `keep` of
      the channels that matter most (ours), and reads no others of up and down. See `model.ffn.LayerChannels`.
    thresholds: one for all layers, or one a layer; of the rules "gate" and "product".
    keep: of the rule "shared".
    dense_layers: layers that leave nothing out.

    Raises:
      UserError: a field is out of range, or not the rule's.
    """

    rule: str = "gate"
    thresholds: tuple[float, ...] | None = None
    keep: float | None = None
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _choice("ffn rule", self.rule, CHANNEL_RULES)
        wanted, other = ("keep", "thresholds") if self.rule == "shared" else ("thresholds", "keep")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise UserError(
                f"ffn rule {self.rule!r} with "
                f"{'no ' + wanted if getattr(self, wanted) is None else other}; "
                f"allowed: {wanted} and no {other}"
            )
        if self.thresholds is not None:
            object.__setattr__(self, "thresholds", _numbers("ffn thresholds", self.thresholds, THRESHOLD))
        if self.keep is not None:
            object.__setattr__(self, "keep", KEEP.check("ffn keep", self.keep))
        object.__setattr__(self, "dense_layers", check_layers("ffn dense-layers", self.dense_layers))


@dataclasses.dataclass(frozen=True)
class ExpertSparsity:
    """Sparse experts: SMoE of arXiv 2512.21911, a list that a step's tokens share (ours), a smaller k. Lossy.

    They apply in this order, each if it is given; one of the first two:
      experts_per_token: each token's k' < k best experts, for all tokens alike (the control).
      max_skipped, betas, reading: of each token, up to max_skipped experts of the least weight. i of them are
        left out if the share of the i least weights is below betas[layer][i - 1]; "first" tests
        i = 1, 2, .. and stops at the first that fails, "largest" takes the largest i that passes.
      shortlist, outside: the step's tokens vote with their weights, and only the `shortlist` experts of a
        layer with most votes are read. A token's experts outside of it are dropped ("truncate"), or it
        takes its k best inside ("repick").
      capacity_factor: an expert takes no more than ceil(capacity_factor * tokens * k / experts) tokens of a
        step, the first ones; others lose it. Without it no token is ever dropped.
    renormalise: what is left of a token's weights is scaled to the sum that they had (the paper's figure).
      None: as the model's own router does (norm_topk_prob).

    Raises:
      UserError: a field is out of range, or one lacks what belongs to it.
    """

    experts_per_token: int | None = None
    max_skipped: int | None = None
    betas: tuple[tuple[float, ...], ...] | None = None
    reading: str = "first"
    shortlist: int | None = None
    outside: str = "truncate"
    capacity_factor: float | None = None
    renormalise: bool | None = None

    def __post_init__(self) -> None:
        for name, limits in EXPERT_RANGES.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, limits.check(f"experts {name.replace('_', '-')}", value))
        _choice("experts reading", self.reading, READINGS)
        _choice("experts outside", self.outside, OUTSIDE)
        if not isinstance(self.renormalise, bool | None):
            raise UserError(f"experts renormalise {self.renormalise!r} is not allowed; allowed: true, false")
        if self.max_skipped is not None and self.betas is None:
            raise UserError(
                f"experts max-skipped {self.max_skipped} without betas; allowed: with the betas of a "
                "sparsity file that `python -m sv_jax.calibrate --part experts` has written"
            )
        if self.max_skipped is not None and self.experts_per_token is not None:
            raise UserError(
                f"experts max-skipped {self.max_skipped} and experts-per-token {self.experts_per_token} are "
                "both given; allowed: one of the two"
            )
        if self.betas is not None:
            if not isinstance(self.betas, list | tuple) or not self.betas:
                raise UserError(f"experts betas {self.betas!r}; allowed: a list of numbers for each layer")
            rows = tuple(
                _numbers(f"experts betas of entry {i}", row, BETA) for i, row in enumerate(self.betas)
            )
            object.__setattr__(self, "betas", rows)
        if all(getattr(self, name) is None for name in EXPERT_RANGES):
            raise UserError(
                "experts leave nothing out; allowed: experts-per-token, max-skipped, shortlist, "
                "capacity-factor, or several"
            )
