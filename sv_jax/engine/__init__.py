"""From prompts to text on the host: loading a model, batches, buckets, slices, statistics."""

from sv_jax.engine.language_model import (
    DEFAULT_MODEL,
    DTYPES,
    LanguageModel,
    load_model,
)
from sv_jax.engine.lossless import Divergence, LosslessReport
from sv_jax.engine.results import GenerationResult, GenerationStats, RequestOutput, TokenLogprob
from sv_jax.engine.settings import DRAFT_METHODS

__all__ = [
    "DEFAULT_MODEL",
    "DRAFT_METHODS",
    "DTYPES",
    "Divergence",
    "GenerationResult",
    "GenerationStats",
    "LanguageModel",
    "LosslessReport",
    "RequestOutput",
    "TokenLogprob",
    "load_model",
]
