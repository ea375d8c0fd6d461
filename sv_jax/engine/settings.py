"""What a call of `generate` asks for beside its prompts, checked before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from sv_jax.config import UserError
from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.engine.row_text import check_stop
from sv_jax.engine.speculation_length import AdaptiveLength, FixedLength, SpeculationLength
from sv_jax.sampling_params import GREEDY, SamplingParams
from sv_jax.sparsity.config import SparsityConfig
from sv_jax.speculation.types import Drafter

DRAFT_METHODS = ("prompt-lookup", "none")
MOST_LOGPROBS = 20


def make_drafter(draft_method: str, num_speculative_tokens: int) -> Drafter:
    """The drafter of a name; K = 0 decodes plainly whatever the name."""
    if draft_method == "none" or num_speculative_tokens == 0:
        return NoDraft()
    return PromptLookup(num_speculative_tokens)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Arguments of `LanguageModel.generate`, which explains them. Raises UserError for bad ones."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    num_speculative_tokens: int | Literal["auto"] = 7
    draft_method: str = "prompt-lookup"
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY
    stop: Sequence[str] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int = 0
    max_batch_size: int = 16
    sparsity: SparsityConfig | None = None  # None: dense verification

    def __post_init__(self) -> None:
        if self.draft_method not in DRAFT_METHODS:
            raise UserError(f"draft method {self.draft_method!r}; allowed: {', '.join(DRAFT_METHODS)}")
        self._check_number("max_new_tokens", 1)
        self._check_number("max_batch_size", 1)
        self._check_number("min_new_tokens", 0, self.max_new_tokens, " (max_new_tokens)")
        self._check_number("logprobs", 0, MOST_LOGPROBS)
        if self.num_speculative_tokens != "auto":
            self._check_number("num_speculative_tokens", 0, also="0 (plain) or more, or 'auto'")
        check_stop(self.stop)
        if not isinstance(self.sparsity, SparsityConfig | None):
            raise UserError(f"sparsity={self.sparsity!r}; allowed: a SparsityConfig, or None")

    def _check_number(
        self, name: str, least: int, most: int | None = None, note: str = "", also: str | None = None
    ) -> None:
        value = getattr(self, name)
        if isinstance(value, int) and value >= least and (most is None or value <= most):
            return
        allowed = also or (f"{least} or more" if most is None else f"{least} to {most}{note}")
        raise UserError(f"{name}={value!r}; allowed: {allowed}")

    def sampling_of(self, count: int) -> list[SamplingParams]:
        """One per prompt. Raises UserError for a list of another length."""
        if isinstance(self.sampling, SamplingParams):
            return [self.sampling] * count
        if len(self.sampling) != count:
            raise UserError(
                f"sampling has {len(self.sampling)} entries for {count} prompts; give one, or one per prompt"
            )
        return list(self.sampling)

    def make_length(self) -> SpeculationLength:
        """Who decides how many tokens are drafted."""
        if self.num_speculative_tokens == "auto" and self.draft_method != "none":
            return AdaptiveLength(lambda k: make_drafter(self.draft_method, k))
        k = 0 if self.num_speculative_tokens == "auto" else self.num_speculative_tokens
        return FixedLength(make_drafter(self.draft_method, k))
