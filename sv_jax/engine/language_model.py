"""A loaded model: prompts in, text out. The Python interface, and what the command line calls."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from pallas_kernels.platform import IMPLEMENTATIONS, MOST_STEP_TOKENS
from sv_jax.checkpoints import Checkpoint, Tokenizer, default_cache_directory, load_params, resolve
from sv_jax.checkpoints.cache import writable_cache
from sv_jax.config import DEFAULT_CUTS, Cuts, UserError
from sv_jax.engine.buckets import largest_bucket
from sv_jax.engine.compile_cache import enable_compilation_cache
from sv_jax.engine.compile_clock import compile_seconds
from sv_jax.engine.decoding import BatchRequest, decode_batch, next_token_logits, padded_batch
from sv_jax.engine.lossless import LosslessReport, compare_outputs
from sv_jax.engine.reader import OnText
from sv_jax.engine.results import BatchOutcome, GenerationResult, RequestOutput, summarise
from sv_jax.engine.settings import Settings
from sv_jax.engine.speculation_length import AdaptiveLength, SpeculationLength
from sv_jax.model.cached_attention import CacheReader, step_implementation
from sv_jax.model.transformer import Params, Transformer, abstract_params
from sv_jax.sampling_params import GREEDY, SamplingParams
from sv_jax.sharding import Sharding, ensure_devices, make_sharding
from sv_jax.sparsity.config import SparsityConfig
from sv_jax.sparsity.plan import SparsityPlan, describe, make_plan
from sv_jax.speculation.loop import step_width

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


def count_occurrences(prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[int]:
    """Of each prompt: how many equal prompts with the same seed stand before it."""
    seen: Counter[tuple[tuple[int, ...], int]] = Counter()
    occurrences = []
    for prompt, params in zip(prompts, sampling):
        key = (tuple(prompt), params.seed)
        occurrences.append(seen[key])
        seen[key] += 1
    return occurrences


def check_implementation(name: str | None, platform: str) -> None:
    """Raises UserError for an unknown implementation, or one that the platform cannot run."""
    allowed = [x for x in IMPLEMENTATIONS if x != "pallas_tpu" or platform == "tpu"]
    if name is not None and name not in allowed:
        raise UserError(f"implementation {name!r}; allowed on {platform}: {', '.join(allowed)}")


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
        implementation: str | None = None,
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
        self.target = Transformer(checkpoint.config, dtype, sharding, implementation)
        self.load_seconds = 0.0
        self._progress = progress
        self._params: Params | None = None
        # Keeps the costs that were measured, by what they depend on beside the bucket.
        self._adaptive: dict[tuple[str, int, SparsityConfig | None], AdaptiveLength] = {}

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

    def check_request(self, prompts: Sequence[Sequence[int]], **settings: Any) -> None:
        """Raises UserError for what `generate` would refuse; reads no weights."""
        checked = Settings(**settings)
        checked.sampling_of(len(prompts))
        self.step_implementations(checked, len(prompts), self._plan(checked))
        self._check_prompts(prompts)

    def _plan(self, settings: Settings) -> SparsityPlan | None:
        """What verification leaves out, on the mesh. Raises UserError for layers that the model lacks."""
        if settings.sparsity is None:
            return None
        plan = make_plan(settings.sparsity, self.checkpoint.config)
        return jax.device_put(plan, self.sharding.named())

    def step_implementations(
        self, settings: Settings, rows: int, plan: SparsityPlan | None
    ) -> tuple[str, ...]:
        """What attends to the cache in verify steps: those that read all, and those that select.

        Raises UserError where the named implementation does not take their shapes.
        """
        batch = padded_batch(min(rows, settings.max_batch_size), self.sharding.data_size)
        tokens = step_width(self.target, settings.make_length().most, batch)
        capacity = largest_bucket(self.max_model_len, tokens, self.sharding.parts("kv_length"))
        named, config = self.target.implementation, self.checkpoint.config
        if tokens > MOST_STEP_TOKENS and named not in (None, "xla"):
            raise UserError(f"a step of {tokens} tokens; allowed with {named}: up to {MOST_STEP_TOKENS}")
        selections: list[tuple[int, int] | None] = [None]
        if plan is not None and (attention := plan.attention) is not None:
            selections.append((attention.block_size, attention.most_blocks(capacity)))
        reader = CacheReader(None, 1.0, named, self.sharding)
        sizes = {"batch": batch, "tokens": tokens, "capacity": capacity}
        try:
            return tuple(
                step_implementation(config, reader, self.dtype, **sizes, selected=selected)
                for selected in selections
            )
        except NotImplementedError as error:
            raise UserError(f"implementation {named!r}: {error}") from error

    def describe_sparsity(self, sparsity: SparsityConfig) -> list[str]:
        """What verification will leave out, in lines. Raises UserError for what `generate` would refuse."""
        config = self.checkpoint.config
        return describe(make_plan(sparsity, config), config)

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
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
        min_new_tokens: int = 0,
        num_speculative_tokens: int | Literal["auto"] = 7,
        draft_method: str = "prompt-lookup",
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        ignore_eos: bool = False,
        logprobs: int = 0,
        chat: bool | None = None,
        max_batch_size: int = 16,
        sparsity: SparsityConfig | None = None,
        on_text: OnText | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> GenerationResult:
        """Decodes speculatively. Greedy output is that of plain greedy decoding, up to near-ties; sampled
        output follows the law of plain sampling (with prompt lookup it is what plain sampling would draw).
        With `sparsity` neither holds any more once a step has left something out; `stats.sparse_attention`
        counts such steps.

        Args:
          prompts: texts (see `encode_prompt`), or token ids that are taken as they are.
          max_new_tokens: exact limit of output tokens per prompt; the context limit may end a row before.
          min_new_tokens: output tokens before which no EOS token is emitted; stop strings end a row before.
          num_speculative_tokens: K, drafted tokens per step; 0 decodes plainly; "auto" follows measured
            acceptance and cost, down to plain steps.
          draft_method: "prompt-lookup" or "none".
          sampling: of all prompts, or one per prompt. A prompt's text depends on its own seed, and on its
            number among equal prompts with the same seed, not on what stands beside it.
          stop: texts that end a row when they appear in its output. Its token ids end with the token that
            completes the stop string, its text before it.
          include_stop: the text keeps the stop string.
          ignore_eos: rows end by length, or by a stop string.
          logprobs: most likely tokens, 0 to 20, whose log-probabilities are given beside each output token's
            own; 0 gives none at all.
          max_batch_size: prompts that run side by side, rounded up to a multiple of the data axis; more are
            run in groups, in order.
          sparsity: what verification leaves out (lossy); None: nothing.
          on_text: called between slices of steps, (row, new text, finish reason or None).
          should_stop: asked between slices; True ends the run with what was generated.

        Raises:
          UserError: see `check_request`.
        """
        settings = Settings(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            num_speculative_tokens=num_speculative_tokens,
            draft_method=draft_method,
            sampling=sampling,
            stop=tuple(stop) if not isinstance(stop, str) else stop,
            include_stop=include_stop,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            max_batch_size=max_batch_size,
            sparsity=sparsity,
        )
        if isinstance(prompts, str):  # a sequence of strings, too: one prompt per character
            raise UserError(f"prompts is one text, {prompts[:20]!r}; give a list of texts")
        rows = [self.encode_prompt(p, chat=chat) if isinstance(p, str) else list(p) for p in prompts]
        self._check_prompts(rows)
        return self._run(rows, settings, on_text, latched(should_stop or (lambda: False)))

    def _run(
        self,
        rows: list[list[int]],
        settings: Settings,
        on_text: OnText | None,
        should_stop: Callable[[], bool],
    ) -> GenerationResult:
        sampling = settings.sampling_of(len(rows))
        occurrences = count_occurrences(rows, sampling)
        plan = self._plan(settings)
        params = self.params
        compiled_before = compile_seconds()
        batch_size = padded_batch(min(len(rows), settings.max_batch_size), self.sharding.data_size)
        length = self._length(settings, batch_size)
        outcomes: list[BatchOutcome] = []
        for first in range(0, len(rows), batch_size):
            if outcomes and should_stop():
                break
            batch = slice(first, first + batch_size)
            request = BatchRequest(
                prompts=rows[batch],
                first_row=first,
                sampling=sampling[batch],
                occurrences=occurrences[batch],
                max_new_tokens=settings.max_new_tokens,
                min_new_tokens=settings.min_new_tokens,
                max_model_len=self.max_model_len,
                eos_ids=() if settings.ignore_eos else self.checkpoint.eos_token_ids,
                vocab_size=self.tokenizer.vocab_size,
                stop=tuple(settings.stop),
                include_stop=settings.include_stop,
                logprobs=settings.logprobs,
            )
            outcome = decode_batch(
                self.target,
                params,
                length,
                request,
                tokenizer=self.tokenizer,
                batch_size=batch_size,
                sparsity=plan,
                on_text=on_text,
                should_stop=should_stop,
            )
            outcomes.append(outcome)
        outputs = [output for outcome in outcomes for output in outcome.outputs]
        # A prompt whose batch never ran has no tokens of its own.
        outputs += [RequestOutput(len(row), [], "", "interrupted") for row in rows[len(outputs) :]]
        stats = summarise(outcomes, compile_seconds() - compiled_before, self.load_seconds)
        interrupted = any(o.finish_reason == "interrupted" for o in outputs)
        return GenerationResult(outputs, stats, settings, interrupted)

    def _length(self, settings: Settings, batch_size: int) -> SpeculationLength:
        """Who decides how many tokens are drafted; what it measured in earlier calls is not lost."""
        length = settings.make_length()
        if not isinstance(length, AdaptiveLength):
            return length
        sparsity = settings.sparsity and dataclasses.replace(settings.sparsity, provenance=())
        known = self._adaptive.setdefault((settings.draft_method, batch_size, sparsity), length)
        known.restart()
        return known

    def compare_with_plain(
        self,
        result: GenerationResult,
        prompts: Sequence[Sequence[int]],
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> LosslessReport:
        """Decodes the same prompts plainly and densely, with the other settings of `result`, and compares
        token for token.

        An interrupted row, of either run, is compared as far as it got.
        """
        settings = dataclasses.replace(result.settings, draft_method="none", logprobs=0, sparsity=None)
        stop = latched(should_stop or (lambda: False))
        plain = self._run([list(prompt) for prompt in prompts], settings, None, stop)
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
    implementation: str | None = None,
    cuts: Cuts = DEFAULT_CUTS,
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
      implementation: what attends to the cache in verify steps, of pallas_kernels.platform.IMPLEMENTATIONS;
        None: what the platform runs best of those that take the model's shapes.
      cuts: what the mesh cuts otherwise than usual: the cache over its length, experts over all devices.
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
    check_implementation(implementation, jax.default_backend())
    dtype = dtype or default_dtype(jax.default_backend())
    cache = Path(cache_directory or default_cache_directory()).expanduser()
    checkpoint = resolve(model, dtype=dtype, cache_directory=cache, progress=progress, notify=notify)
    enable_compilation_cache(writable_cache(cache, notify))
    sharding = make_sharding(checkpoint.config, mesh, cuts)
    loaded = LanguageModel(
        model,
        checkpoint,
        sharding,
        dtype=dtype,
        max_model_len=max_model_len,
        implementation=implementation,
        progress=progress,
    )
    if not lazy:
        loaded.load_weights()
    return loaded
