"""A loaded model: prompts in, text out. The Python interface, and what the command line calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from sv_jax.checkpoints import Checkpoint, Tokenizer, default_cache_directory, load_params, resolve
from sv_jax.checkpoints.cache import writable_cache
from sv_jax.config import UserError
from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.engine.compile_cache import enable_compilation_cache
from sv_jax.engine.compile_clock import compile_seconds
from sv_jax.engine.decoding import BatchRequest, OnTokens, decode_batch, next_token_logits, padded_batch
from sv_jax.engine.lossless import LosslessReport, compare_outputs
from sv_jax.engine.results import (
    BatchOutcome,
    FinishReason,
    GenerationResult,
    RequestOutput,
    summarise,
)
from sv_jax.model.transformer import Params, Transformer, abstract_params
from sv_jax.sharding import Sharding, ensure_devices, make_sharding
from sv_jax.speculation.types import Drafter

DRAFT_METHODS = ("prompt-lookup", "none")
DTYPES = ("float32", "bfloat16")
DEFAULT_MODEL = "smollm2-135m"


def print_notice(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def latched(should_stop: Callable[[], bool]) -> Callable[[], bool]:
    """Stays True once it was: a batch whose prefill was cut short must not be decoded any more."""
    stopped = False

    def ask() -> bool:
        nonlocal stopped
        stopped = stopped or should_stop()
        return stopped

    return ask


def make_drafter(draft_method: str, num_speculative_tokens: int) -> Drafter:
    """The drafter of a name. K = 0 decodes plainly whatever the name. Raises UserError."""
    if draft_method not in DRAFT_METHODS:
        raise UserError(f"draft method {draft_method!r}; allowed: {', '.join(DRAFT_METHODS)}")
    if num_speculative_tokens < 0:
        raise UserError(f"num_speculative_tokens={num_speculative_tokens}; allowed: 0 (plain) or more")
    if draft_method == "none" or num_speculative_tokens == 0:
        return NoDraft()
    return PromptLookup(num_speculative_tokens)


def default_dtype(platform: str) -> str:
    return "float32" if platform == "cpu" else "bfloat16"


class LanguageModel:
    """A target model with its tokenizer on a mesh. Weights are read at first use of `params`."""

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        sharding: Sharding,
        *,
        dtype: str,
        max_model_len: int | None = None,
        progress: bool = True,
    ) -> None:
        context = checkpoint.config.max_position_embeddings
        if max_model_len is not None and not 2 <= max_model_len <= context:
            raise UserError(f"max_model_len={max_model_len}; allowed for {name}: 2 to {context}")
        self.name = name
        self.checkpoint = checkpoint
        self.sharding = sharding
        self.dtype = dtype
        self.max_model_len = max_model_len or context
        self.tokenizer: Tokenizer = checkpoint.tokenizer()
        self.target = Transformer(checkpoint.config, dtype, sharding)
        self.load_seconds = 0.0
        self._progress = progress
        self._params: Params | None = None

    @property
    def provenance(self) -> str:
        """Where the weights come from, in one line."""
        return self.checkpoint.provenance

    @property
    def params(self) -> Params:
        """Weights on their shards: what the jitted functions take beside `target`."""
        self.load_weights()
        assert self._params is not None
        return self._params

    def load_weights(self) -> None:
        """Reads the weights onto their shards, once."""
        if self._params is None:
            started = time.perf_counter()
            abstract = abstract_params(self.target)
            self._params = load_params(self.checkpoint, abstract, progress=self._progress)
            jax.block_until_ready(self._params)
            self.load_seconds = time.perf_counter() - started

    def encode_prompt(self, text: str, *, chat: bool | None = None) -> list[int]:
        """Token ids of a prompt, as one user message of the chat template if `chat`.

        chat=None uses the template where the model has one. Raises UserError for chat=True without one.
        """
        if not text:
            raise UserError("a prompt is empty; give at least one character")
        if chat is None:
            chat = self.tokenizer.has_chat_template
        if not chat:
            return self.tokenizer.encode(text)
        if not self.tokenizer.has_chat_template:
            raise UserError(f"{self.name} has no chat template; use --no-chat (chat=False)")
        rendered = self.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return self.tokenizer.encode(rendered, add_special_tokens=False)

    def check_request(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        num_speculative_tokens: int = 7,
        draft_method: str = "prompt-lookup",
        max_batch_size: int = 16,
    ) -> None:
        """Raises UserError for what `generate` would refuse; reads no weights."""
        make_drafter(draft_method, num_speculative_tokens)
        for name, value in (("max_new_tokens", max_new_tokens), ("max_batch_size", max_batch_size)):
            if value < 1:
                raise UserError(f"{name}={value}; allowed: 1 or more")
        if not prompts:
            raise UserError("no prompts; give at least one")
        vocabulary = self.checkpoint.config.vocab_size
        for row, prompt in enumerate(prompts):
            if not prompt:
                raise UserError(f"prompt {row + 1} has no tokens; give at least one")
            if len(prompt) >= self.max_model_len:
                raise UserError(
                    f"prompt {row + 1} has {len(prompt)} tokens; allowed: at most {self.max_model_len - 1}, "
                    f"the context of {self.max_model_len} less one for the output"
                )
            if min(prompt) < 0 or max(prompt) >= vocabulary:
                raise UserError(f"prompt {row + 1} has a token id outside 0 .. {vocabulary - 1}")

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 128,
        num_speculative_tokens: int = 7,
        draft_method: str = "prompt-lookup",
        chat: bool | None = None,
        ignore_eos: bool = False,
        max_batch_size: int = 16,
        on_tokens: OnTokens | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> GenerationResult:
        """Decodes greedily, speculatively; the output is that of plain greedy decoding, up to near-ties.

        Args:
          prompts: texts (see `encode_prompt`), or token ids that are taken as they are.
          max_new_tokens: exact limit of output tokens per prompt; the context limit may end a row before.
          num_speculative_tokens: K, drafted tokens per step; 0 decodes plainly.
          draft_method: "prompt-lookup" or "none".
          ignore_eos: rows end by length alone.
          max_batch_size: prompts that run side by side, rounded up to a multiple of the data axis; more are
            run in groups, in order.
          on_tokens: called between slices of steps, (row, new token ids, finish reason or None).
          should_stop: asked between slices; True ends the run with what was generated.

        Raises:
          UserError: see `check_request`.
        """
        if isinstance(prompts, str):  # a sequence of strings, too: one prompt per character
            raise UserError(f"prompts is one text, {prompts[:20]!r}; give a list of texts")
        rows = [self.encode_prompt(p, chat=chat) if isinstance(p, str) else list(p) for p in prompts]
        self.check_request(
            rows,
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=num_speculative_tokens,
            draft_method=draft_method,
            max_batch_size=max_batch_size,
        )
        drafter = make_drafter(draft_method, num_speculative_tokens)
        stop = latched(should_stop or (lambda: False))
        params = self.params
        compiled_before = compile_seconds()
        batch_size = padded_batch(min(len(rows), max_batch_size), self.sharding.data_size)
        outcomes: list[BatchOutcome] = []
        for first in range(0, len(rows), batch_size):
            if outcomes and stop():
                break
            request = BatchRequest(
                prompts=rows[first : first + batch_size],
                first_row=first,
                max_new_tokens=max_new_tokens,
                max_model_len=self.max_model_len,
                eos_ids=() if ignore_eos else self.checkpoint.eos_token_ids,
            )
            outcome = decode_batch(
                self.target,
                params,
                drafter,
                request,
                batch_size=batch_size,
                on_tokens=on_tokens,
                should_stop=stop,
            )
            outcomes.append(outcome)
        stats = summarise(outcomes, compile_seconds() - compiled_before, self.load_seconds)
        outputs = self._outputs(rows, outcomes)
        interrupted = any(o.finish_reason == "interrupted" for o in outputs)
        return GenerationResult(outputs, stats, interrupted)

    def _outputs(self, rows: list[list[int]], outcomes: list[BatchOutcome]) -> list[RequestOutput]:
        """One output per prompt; a prompt whose batch never ran has none of its own tokens."""
        token_ids = [ids for outcome in outcomes for ids in outcome.token_ids]
        reasons = [reason for outcome in outcomes for reason in outcome.finish_reasons]
        missing = len(rows) - len(token_ids)
        token_ids += [[] for _ in range(missing)]
        reasons += ["interrupted"] * missing
        return [
            RequestOutput(len(prompt), ids, self._text(ids, reason), reason)
            for prompt, ids, reason in zip(rows, token_ids, reasons)
        ]

    def _text(self, token_ids: list[int], reason: FinishReason) -> str:
        """The text of an output; the token that ended it is none, even where a tokenizer would show it."""
        return self.tokenizer.decode(token_ids[:-1] if reason == "stop" else token_ids)

    def compare_with_plain(
        self,
        result: GenerationResult,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        ignore_eos: bool = False,
        max_batch_size: int = 16,
        should_stop: Callable[[], bool] | None = None,
    ) -> LosslessReport:
        """Decodes the same prompts plainly and compares token for token.

        An interrupted row, of either run, is compared as far as it got.
        """
        plain = self.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            draft_method="none",
            ignore_eos=ignore_eos,
            max_batch_size=max_batch_size,
            should_stop=should_stop,
        )
        return compare_outputs(result.outputs, plain.outputs, prompts, self.top2_gap)

    def next_token_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32[V]: the target's logits after `token_ids`. Raises UserError for none, or too many."""
        context = self.checkpoint.config.max_position_embeddings
        if not 1 <= len(token_ids) <= context:
            raise UserError(f"{len(token_ids)} tokens; allowed: 1 to {context}")
        return next_token_logits(self.target, self.params, token_ids)

    def top2_gap(self, token_ids: Sequence[int]) -> float:
        """Difference of the two largest logits after `token_ids`."""
        second, first = np.sort(self.next_token_logits(token_ids))[-2:]
        return float(first - second)


def load_model(
    model: str = DEFAULT_MODEL,
    *,
    mesh: tuple[int, int] = (1, 1),
    dtype: str | None = None,
    max_model_len: int | None = None,
    cache_directory: str | Path | None = None,
    progress: bool = True,
    notify: Callable[[str], None] = print_notice,
    lazy: bool = False,
) -> LanguageModel:
    """Finds, fetches and loads a model.

    Args:
      model: a registered name, a hub id, a Hugging Face directory or a GGUF file (sv_jax.checkpoints).
      mesh: (data, model) shards; CPU emulates as many devices as that takes, before JAX is used.
      dtype: "float32" or "bfloat16", of weights and cache; None: float32 on CPU, bfloat16 elsewhere.
      max_model_len: tokens of prompt and output together; None: the model's own context.
      cache_directory: of fetched and converted weights and compiled programs; None: the user's cache.
      lazy: read the weights at first use.

    Raises:
      UserError: what is asked for is not there, or does not fit. Nothing is read before that is known.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}; allowed: {', '.join(DTYPES)}")
    if min(mesh) < 1:
        raise UserError(f"mesh {mesh[0]}x{mesh[1]}; allowed: 1 or more shards on each axis")
    ensure_devices(mesh[0] * mesh[1])
    dtype = dtype or default_dtype(jax.default_backend())
    cache = Path(cache_directory or default_cache_directory()).expanduser()
    checkpoint = resolve(model, dtype=dtype, cache_directory=cache, progress=progress, notify=notify)
    enable_compilation_cache(writable_cache(cache, notify))
    sharding = make_sharding(checkpoint.config, mesh)
    loaded = LanguageModel(
        model, checkpoint, sharding, dtype=dtype, max_model_len=max_model_len, progress=progress
    )
    if not lazy:
        loaded.load_weights()
    return loaded
