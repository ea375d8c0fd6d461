"""How plain decoding picks a token, in numpy: penalties counted token by token, filters by sorting."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.engine.lossless import NEAR_TIE, first_difference
from sv_jax.model.cache import empty_cache
from sv_jax.model.transformer import Params, Transformer
from sv_jax.sampling_params import SamplingParams
from sv_jax.speculation.request import make_request
from sv_jax.speculation.sampling import Purpose, gumbel_noise
from sv_jax.speculation.types import Draft
from sv_jax.speculation.verify import verify
from tests.speculation.plain_law import plain_logits

LONGEST = 128  # tokens of one forward pass


@functools.partial(jax.jit, static_argnames=("target",))
def _forward(target: Transformer, params: Params, tokens: jax.Array) -> jax.Array:
    cache = empty_cache(target.config, 1, 8, "float32", target.sharding)
    chain = Draft(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] - 1)
    return verify(target, params, cache, jnp.zeros(1, jnp.int32), chain).logits[0]


def logits_of(target: Transformer, params: Params, tokens: Sequence[int]) -> np.ndarray:
    """float32[N, V]: all tokens in one forward pass, over an empty cache."""
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_forward(target, params, padded))[: len(tokens)]


def penalised(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> np.ndarray:
    """float64[V] for the token that follows."""
    result = logits.astype(np.float64)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token, count in Counter(output).items():
        result[token] -= params.frequency_penalty * count + params.presence_penalty
    return result


@dataclasses.dataclass
class PlainDecoder:
    """What one row may emit. logits_of: tokens -> [N, V], the target's logits after each of them."""

    logits_of: Callable[[Sequence[int]], np.ndarray]
    params: SamplingParams
    occurrence: int = 0
    eos_ids: Sequence[int] = ()
    min_new_tokens: int = 0

    def scores(self, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        """float64[N, V]: the largest of row i is the output's token i, given those before it."""
        logits = self.logits_of([*prompt, *output])[len(prompt) - 1 : -1]
        rows = [penalised(row, prompt, output[:i], self.params) for i, row in enumerate(logits)]
        for row in rows[: self.min_new_tokens]:
            row[list(self.eos_ids)] = -np.inf
        if not self.params.greedy:
            filtered = [plain_logits(row, self.params) for row in rows]
            rows = filtered + self._noise(len(prompt), len(output), logits.shape[1])
        return np.array(rows)

    def _noise(self, first: int, count: int, vocab_size: int) -> np.ndarray:
        sampling = make_request([1], [1], sampling=[self.params], occurrences=[self.occurrence]).sampling
        positions = np.arange(first, first + count, dtype=np.int32)[None]
        return np.asarray(gumbel_noise(sampling, positions, vocab_size, Purpose.TOKEN))[0]

    def shortfalls(self, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        """float64[N]: how far each token's score is below the best; 0 for what plain decoding emits."""
        scores = self.scores(prompt, output)
        return scores.max(-1) - scores[np.arange(len(output)), list(output)]

    def check(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Every token is the best after those before it: by induction, what plain decoding emits."""
        behind = self.shortfalls(prompt, output)
        assert behind.max() < NEAR_TIE, f"output token {behind.argmax()} is {behind.max():.3f} below the best"

    def check_same(self, prompt: Sequence[int], got: Sequence[int], expected: Sequence[int]) -> None:
        """Equal outputs, or both tokens are the best where they first differ."""
        index = first_difference(got, expected)
        if index is not None:
            assert index < min(len(got), len(expected)), f"{len(got)} tokens, {len(expected)} expected"
            gap = max(self.shortfalls(prompt, text[: index + 1])[-1] for text in (got, expected))
            assert gap < NEAR_TIE, f"token {index} is {got[index]}, not {expected[index]}: {gap:.3f} apart"
