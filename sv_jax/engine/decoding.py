"""The host side of one batch: it picks buckets, starts slices and reads what they emitted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.engine.buckets import bucket_for, chunk_sizes, largest_bucket, next_chunk, round_up
from sv_jax.engine.compile_clock import compile_seconds
from sv_jax.engine.results import BatchOutcome, FinishReason
from sv_jax.model.transformer import Params, Transformer
from sv_jax.speculation.loop import decode_slice, step_width
from sv_jax.speculation.prefill import prefill_chunk
from sv_jax.speculation.state import grow_state, start_state
from sv_jax.speculation.types import Draft, Drafter, SpeculationState
from sv_jax.speculation.verify import verify

# Every K up to this one, and every number of EOS ids up to that one, has a state of one shape: plain and
# speculative decoding then share their prefill programs.
SHARED_SPECULATIVE_TOKENS = 15
EOS_MULTIPLE = 4

OnTokens = Callable[[int, list[int], FinishReason | None], None]
"""(row, new token ids, finish reason in the row's last call)."""


@dataclasses.dataclass(frozen=True)
class BatchRequest:
    """Prompts that decode together."""

    prompts: Sequence[Sequence[int]]
    first_row: int  # the caller's index of prompts[0]
    max_new_tokens: int
    max_model_len: int
    eos_ids: Sequence[int]  # empty: rows end by length alone
    steps_per_slice: int = 16


class _Stopwatch:
    """Wall time less the compilation that fell into it."""

    def __init__(self) -> None:
        self.started = time.perf_counter() - compile_seconds()

    def seconds(self) -> float:
        return max(0.0, time.perf_counter() - compile_seconds() - self.started)


def ensure_capacity(
    target: Transformer, state: SpeculationState, slots: int, largest: int
) -> SpeculationState:
    """The state in a bucket with at least `slots` slots."""
    bucket = bucket_for(slots, largest)
    if bucket <= state.cache.capacity:
        return state
    return grow_state(target, state, capacity=bucket)


def _place_start(
    target: Transformer,
    prompt_lengths: Sequence[int],
    limits: Sequence[int],
    eos_ids: Sequence[int],
    capacity: int,
    num_speculative_tokens: int,
) -> SpeculationState:
    ends = np.full((len(limits), round_up(max(1, len(eos_ids)), EOS_MULTIPLE)), -1, np.int32)
    ends[:, : len(eos_ids)] = eos_ids
    row, matrix = target.sharding.named("batch"), target.sharding.named("batch", None)
    return start_state(
        target,
        jax.device_put(np.array(prompt_lengths, np.int32), row),
        jax.device_put(np.array(limits, np.int32), row),
        jax.device_put(ends, matrix),
        capacity=capacity,
        num_speculative_tokens=max(num_speculative_tokens, SHARED_SPECULATIVE_TOKENS),
    )


def padded_batch(rows: int, data_size: int) -> int:
    """Rows of the batch: a multiple of the data axis."""
    return round_up(max(rows, 1), data_size)


def prefill(
    target: Transformer,
    params: Params,
    prompts: Sequence[Sequence[int]],
    state: SpeculationState,
    largest: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> SpeculationState:
    """Runs all prompts through the target, chunk by chunk, growing the cache as they get longer."""
    total = max(len(p) for p in prompts)
    batch = state.lengths.shape[0]
    sharding = target.sharding
    heads = target.config.num_heads // (1 if "heads" in sharding.replicated else sharding.model_size)
    emulated = sharding.platform == "cpu" and sharding.mesh.size > 1
    sizes = chunk_sizes(batch // sharding.data_size, heads, bucket_for(total, largest), emulated=emulated)
    offset = 0
    while offset < total and not should_stop():
        size = next_chunk(offset, total, sizes, largest)
        state = ensure_capacity(target, state, offset + size, largest)
        tokens = np.zeros((batch, size), np.int32)
        for row, prompt in zip(tokens, prompts):
            part = prompt[offset : offset + size]
            row[: len(part)] = part
        placed = jax.device_put(tokens, sharding.named("batch", None))
        state = prefill_chunk(target, params, state, placed)
        # Dispatch is asynchronous: minutes of chunks would be under way before should_stop is asked again.
        jax.block_until_ready(state.lengths)
        offset += size
    return state


class _Reader:
    """Reads states back between slices and reports each row's new tokens once."""

    def __init__(self, request: BatchRequest, watch: _Stopwatch, on_tokens: OnTokens | None) -> None:
        self.request = request
        self.watch = watch
        self.on_tokens = on_tokens
        self.longest = 0  # of all rows, committed tokens
        self.done = False
        self.token_ids: list[list[int]] = [[] for _ in request.prompts]
        self.finish_reasons: list[FinishReason | None] = [None for _ in request.prompts]
        self.finish_seconds: list[float] = [0.0 for _ in request.prompts]

    def read(self, state: SpeculationState) -> None:
        """Takes over what is new since the last call."""
        tokens, lengths, finished = jax.device_get((state.tokens, state.lengths, state.finished))
        self.longest, self.done = int(lengths.max()), bool(finished.all())
        seconds = self.watch.seconds()
        for row, prompt in enumerate(self.request.prompts):
            if self.finish_reasons[row] is not None:
                continue
            known = len(prompt) + len(self.token_ids[row])
            new = tokens[row, known : lengths[row] + 1].tolist()
            self.token_ids[row] += new
            self.finish_seconds[row] = seconds
            if finished[row]:
                ended = self.token_ids[row][-1] in self.request.eos_ids
                self.finish_reasons[row] = "stop" if ended else "length"
            if self.on_tokens is not None and new:
                self.on_tokens(self.request.first_row + row, new, self.finish_reasons[row])


def decode_batch(
    target: Transformer,
    params: Params,
    drafter: Drafter,
    request: BatchRequest,
    *,
    batch_size: int,
    on_tokens: OnTokens | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> BatchOutcome:
    """Prefills and decodes one batch to its end, or until `should_stop` says so between slices.

    Args:
      batch_size: rows to run, at least the number of prompts and a multiple of the data axis; the rest pads.
    """
    watch = _Stopwatch()
    width = step_width(target, drafter, batch_size)
    largest = largest_bucket(request.max_model_len, width)
    lengths = [len(p) for p in request.prompts] + [0] * (batch_size - len(request.prompts))
    limits = [min(n + request.max_new_tokens, request.max_model_len) for n in lengths]
    state = _place_start(
        target, lengths, limits, request.eos_ids, bucket_for(1, largest), drafter.num_speculative_tokens
    )
    reader = _Reader(request, watch, on_tokens)
    state = prefill(target, params, request.prompts, state, largest, should_stop)
    reader.read(state)
    first_token_seconds = watch.seconds()

    max_steps = jax.device_put(np.int32(request.steps_per_slice), target.sharding.named())
    while not reader.done and not should_stop():
        state = ensure_capacity(target, state, reader.longest + width, largest)
        state = decode_slice(target, params, drafter, state, max_steps)
        reader.read(state)
    decode_seconds = watch.seconds() - first_token_seconds

    counts = jax.device_get(state.statistics)
    live = len(request.prompts)
    return BatchOutcome(
        token_ids=reader.token_ids,
        finish_reasons=[reason or "interrupted" for reason in reader.finish_reasons],
        histogram=counts.histogram[:live].sum(axis=0)[: drafter.num_speculative_tokens + 2],
        drafted=int(counts.drafted[:live].sum()),
        accepted=int(counts.accepted[:live].sum()),
        steps_with_draft=int(counts.steps_with_draft[:live].sum()),
        steps=int(counts.steps),
        plain_steps=int(counts.plain_steps),
        first_token_seconds=first_token_seconds,
        decode_seconds=decode_seconds,
        row_decode_seconds=[max(0.0, end - first_token_seconds) for end in reader.finish_seconds],
    )


@partial(jax.jit, static_argnames=("target",))
def _root_logits(target: Transformer, params: Params, state: SpeculationState, root: jax.Array) -> jax.Array:
    draft = Draft(tokens=root, parents=jnp.full_like(root, -1))
    return verify(target, params, state.cache, state.lengths, draft).logits[0, 0]


def next_token_logits(target: Transformer, params: Params, token_ids: Sequence[int]) -> np.ndarray:
    """float32[V]: the target's logits after `token_ids`: prefill, then one plain step.

    token_ids: one or more, and no more than the model's context.
    """
    rows = target.sharding.data_size
    *prefix, root = token_ids
    # The buckets of plain decoding: what this compiles does not depend on how many tokens there are.
    largest = largest_bucket(target.config.max_position_embeddings, 1)
    state = _place_start(
        target, [len(prefix)] * rows, [len(prefix) + 2] * rows, (), bucket_for(1, largest), 0
    )
    state = prefill(target, params, [prefix] * rows, state, largest)
    placed = jax.device_put(np.full((rows, 1), root, np.int32), target.sharding.named("batch", None))
    return np.asarray(_root_logits(target, params, state, placed))
