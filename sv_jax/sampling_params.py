"""How the next token is chosen: what a caller may ask for, checked. Greedy unless `temperature` says else."""

from __future__ import annotations

import dataclasses

from sv_jax.config import Range

SEED_LIMIT = 2**32  # seeds are one uint32 on the device
INT_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Frozen and hashable; the defaults are plain greedy decoding.

    Penalties change the logits first, then `temperature` divides them, then `top_k`, `top_p` and `min_p` drop
    tokens; what is left is drawn from. Whole numbers are taken for real fields and become floats.

    Raises:
      UserError: a field is out of range (NaN and infinities are), or not a number.
    """

    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0  # keep this many of the most likely tokens; 0: all
    top_p: float = 1.0  # keep the fewest most likely tokens that together have this probability; 1: all
    min_p: float = 0.0  # keep tokens at least this likely, relative to the most likely one; 0: all
    seed: int = 0
    repetition_penalty: float = 1.0  # on tokens of prompt and output; above 1 discourages
    presence_penalty: float = 0.0  # subtracted once from tokens that are in the output
    frequency_penalty: float = 0.0  # subtracted for each time that a token is in the output

    def __post_init__(self) -> None:
        for name, limits in RANGES.items():
            object.__setattr__(self, name, limits.check(name, getattr(self, name)))

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one (after penalties), so that the seed plays no part."""
        return self.temperature == 0


_PENALTY = Range(float, lambda value: -2 <= value <= 2, "a number from -2 to 2")
RANGES: dict[str, Range] = {
    "temperature": Range(float, lambda value: value >= 0, "a finite number of at least 0"),
    "top_k": Range(int, lambda value: 0 <= value <= INT_MAX, f"a whole number from 0 to {INT_MAX}"),
    "top_p": Range(float, lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    "min_p": Range(float, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "seed": Range(int, lambda value: 0 <= value < SEED_LIMIT, f"a whole number from 0 to {SEED_LIMIT - 1}"),
    "repetition_penalty": Range(float, lambda value: value > 0, "a finite number above 0"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
}


GREEDY = SamplingParams()
