"""The host side of one batch: it picks buckets, starts slices and reads what they emitted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.engine.buckets import bucket_for, chunk_sizes, largest_bucket, plan_chunks, round_up
from sv_jax.engine.compile_clock import compile_seconds
from sv_jax.engine.ffn_reads import FFNCounts, count_ffn_reads
from sv_jax.engine.reader import OnText, Reader, Row, row_logprobs, row_traces
from sv_jax.engine.results import BatchOutcome, RequestOutput
from sv_jax.engine.row_text import RowText
from sv_jax.engine.speculation_length import SliceReport, SpeculationLength
from sv_jax.engine.text_stream import Decoder
from sv_jax.engine.trace import ReadCounts, RowTrace, count_reads, count_steps
from sv_jax.model.transformer import Params, Transformer
from sv_jax.sampling_params import GREEDY, SamplingParams
from sv_jax.sparsity.plan import SparsityPlan
from sv_jax.speculation.loop import decode_slice, step_width
from sv_jax.speculation.prefill import prefill_chunk
from sv_jax.speculation.request import Request, make_request
from sv_jax.speculation.state import grow_state, start_state
from sv_jax.speculation.types import Draft, SpeculationState
from sv_jax.speculation.verify import verify

TOP_LOGPROBS = 20  # alternatives that the device keeps for each token where any are asked for


@dataclasses.dataclass(frozen=True)
class BatchRequest:
    """Prompts that decode together."""

    prompts: Sequence[Sequence[int]]
    first_row: int  # the caller's index of prompts[0]
    sampling: Sequence[SamplingParams]
    occurrences: Sequence[int]  # of each prompt among equal ones with the same seed
    max_new_tokens: int
    max_model_len: int
    eos_ids: Sequence[int]  # empty: rows end by length alone
    vocab_size: int  # token ids that the tokenizer has
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int = 0


class _Stopwatch:
    """Wall time less the compilation that fell into it."""

    def __init__(self) -> None:
        self.started = time.perf_counter() - compile_seconds()

    def seconds(self) -> float:
        return max(0.0, time.perf_counter() - compile_seconds() - self.started)


def _parts(target: Transformer) -> int:
    """That each row of the cache is cut into."""
    return target.sharding.parts("kv_length")


def ensure_capacity(
    target: Transformer, state: SpeculationState, slots: int, largest: int
) -> SpeculationState:
    """The state in a bucket with at least `slots` slots."""
    bucket = bucket_for(slots, largest, _parts(target))
    if bucket <= state.cache.capacity:
        return state
    return grow_state(target, state, capacity=bucket)


def start(
    target: Transformer,
    request: Request,
    *,
    capacity: int,
    num_logprobs: int = 0,
    sparsity: SparsityPlan | None = None,
) -> SpeculationState:
    """A state on the target's mesh."""

    def place(x: np.ndarray) -> jax.Array:
        axes = ("batch", *[None] * (x.ndim - 1)) if x.ndim else ()
        return jax.device_put(x, target.sharding.named(*axes))

    return start_state(
        target,
        jax.tree.map(place, request),
        capacity=capacity,
        num_logprobs=num_logprobs,
        sparsity=sparsity,
    )


def padded_batch(rows: int, data_size: int) -> int:
    """Rows of the batch: a multiple of the data axis."""
    return round_up(max(rows, 1), data_size)


def plan_prefill(target: Transformer, rows: int, total: int, largest: int) -> list[int]:
    """Chunk sizes for a batch of `rows` prompts of up to `total` tokens."""
    sharding = target.sharding
    heads = target.config.num_heads // (1 if "heads" in sharding.replicated else sharding.model_size)
    emulated = sharding.platform == "cpu" and sharding.mesh.size > 1
    return plan_chunks(total, chunk_sizes(rows // sharding.data_size, heads, emulated=emulated), largest)


def prefill(
    target: Transformer,
    params: Params,
    prompts: Sequence[Sequence[int]],
    state: SpeculationState,
    chunks: Sequence[int],
    should_stop: Callable[[], bool] = lambda: False,
) -> SpeculationState:
    """Runs all prompts through the target, chunk by chunk. The state has slots for all of them: what a chunk
    costs follows the tokens before it, not the capacity."""
    offset = 0
    for size in chunks:
        if should_stop():
            break
        tokens = np.zeros((state.lengths.shape[0], size), np.int32)
        for row, prompt in zip(tokens, prompts):
            part = prompt[offset : offset + size]
            row[: len(part)] = part
        placed = jax.device_put(tokens, target.sharding.named("batch", None))
        state = prefill_chunk(target, params, state, placed)
        # Dispatch is asynchronous: minutes of chunks would be under way before should_stop is asked again.
        jax.block_until_ready(state.lengths)
        offset += size
    return state


def _make_request(request: BatchRequest, batch_size: int) -> Request:
    padding = batch_size - len(request.prompts)
    lengths = [len(p) for p in request.prompts] + [0] * padding
    return make_request(
        lengths,
        [min(n + request.max_new_tokens, request.max_model_len) for n in lengths],
        min_lengths=[n + request.min_new_tokens for n in lengths],
        eos_ids=[request.eos_ids] * batch_size,
        vocab_size=request.vocab_size,
        sampling=[*request.sampling, *[GREEDY] * padding],
        occurrences=[*request.occurrences, *[0] * padding],
    )


def decode_batch(
    target: Transformer,
    params: Params,
    length: SpeculationLength,
    request: BatchRequest,
    *,
    tokenizer: Decoder,
    batch_size: int,
    sparsity: SparsityPlan | None = None,
    on_text: OnText | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> BatchOutcome:
    """Prefills and decodes one batch to its end, or until `should_stop` says so between slices.

    Args:
      length: decides slice by slice how many tokens are drafted.
      batch_size: rows to run, at least the number of prompts and a multiple of the data axis; the rest pads.
      sparsity: what verification leaves out, once a cache is large enough for that; None: nothing.
    """
    watch = _Stopwatch()
    rows = [
        Row(
            len(prompt),
            eos_ids=request.eos_ids,
            text=RowText(tokenizer, stop=request.stop, include_stop=request.include_stop),
        )
        for prompt in request.prompts
    ]
    reader = Reader(rows, request.first_row, on_text)
    widest = step_width(target, length.most, batch_size)
    largest = largest_bucket(request.max_model_len, widest, _parts(target))
    num_logprobs = TOP_LOGPROBS if request.logprobs else 0
    arrays = _make_request(request, batch_size)
    total = max(len(prompt) for prompt in request.prompts)
    chunks = plan_prefill(target, batch_size, total, largest)
    capacity = bucket_for(max(sum(chunks), total + widest), largest, _parts(target))
    state = start(target, arrays, capacity=capacity, num_logprobs=num_logprobs, sparsity=sparsity)
    state = prefill(target, params, request.prompts, state, chunks, should_stop)
    state = reader.read(target, state, watch.seconds())
    first_token_seconds = watch.seconds()
    state = _decode(target, params, length, sparsity, state, reader, watch, largest, should_stop)
    decode_seconds = watch.seconds() - first_token_seconds

    for row in rows:
        row.interrupt()
    traces = row_traces(state.trace, rows)
    logprobs = None
    if state.logprobs is not None:
        logprobs = row_logprobs(state.logprobs, rows, request.logprobs)
    return BatchOutcome(
        outputs=[
            RequestOutput(
                row.prompt_tokens,
                row.token_ids,
                row.text,
                row.finish_reason or "interrupted",
                None if logprobs is None else logprobs[i],
            )
            for i, row in enumerate(rows)
        ],
        counts=count_steps(traces, length.most + 1),
        reads=_count_reads(target, sparsity, traces, request.prompts),
        ffn_reads=_count_ffn_reads(target, sparsity, traces),
        first_token_seconds=first_token_seconds,
        decode_seconds=decode_seconds,
        row_decode_seconds=[max(0.0, row.seconds - first_token_seconds) for row in rows],
    )


def _count_reads(
    target: Transformer,
    sparsity: SparsityPlan | None,
    traces: Sequence[RowTrace],
    prompts: Sequence[Sequence[int]],
) -> ReadCounts | None:
    if sparsity is None or sparsity.attention is None:
        return None
    return count_reads(traces, [len(p) for p in prompts], sparsity.attention, target.config, target.dtype)


def _count_ffn_reads(
    target: Transformer, sparsity: SparsityPlan | None, traces: Sequence[RowTrace]
) -> FFNCounts | None:
    if sparsity is None or not sparsity.sparse_ffn:
        return None
    return count_ffn_reads(traces, sparsity, target.config, target.dtype, target.sharding.model_size)


def _decode(
    target: Transformer,
    params: Params,
    length: SpeculationLength,
    sparsity: SparsityPlan | None,
    state: SpeculationState,
    reader: Reader,
    watch: _Stopwatch,
    largest: int,
    should_stop: Callable[[], bool],
) -> SpeculationState:
    """Slices until every row has ended."""
    whole = target.sharding.named()
    while not reader.done and not should_stop():
        plan = length.plan(state.cache.capacity)
        width = step_width(target, plan.drafter.num_speculative_tokens, state.lengths.shape[0])
        state = ensure_capacity(target, state, reader.longest + width, largest)
        steps_before, before, compiled_before = int(state.steps), watch.seconds(), compile_seconds()
        numbers = (jax.device_put(np.int32(n), whole) for n in (plan.max_steps, plan.max_drafted))
        # A bucket that attention's budget covers whole: there the program with dense attention runs.
        left_out = None if sparsity is None else sparsity.within(state.cache.capacity)
        state = decode_slice(target, params, plan.drafter, state, *numbers, sparsity=left_out)
        state = reader.read(target, state, watch.seconds())
        compiling = compile_seconds() - compiled_before
        traces = row_traces(state.trace, reader.rows) if length.wants_traces and not reader.done else []
        length.observe(
            SliceReport(
                bucket=state.cache.capacity,
                first_step=steps_before + 1,
                steps=int(state.steps) - steps_before,
                seconds=watch.seconds() - before,
                compile_seconds=compiling,
                traces=traces,
            )
        )
    return state


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
    largest = largest_bucket(target.config.max_position_embeddings, 1, _parts(target))
    request = make_request([len(prefix)] * rows, [len(prefix) + 2] * rows)
    chunks = plan_prefill(target, rows, len(prefix), largest)
    capacity = bucket_for(max(sum(chunks), len(prefix) + 1), largest, _parts(target))
    state = start(target, request, capacity=capacity)
    state = prefill(target, params, [prefix] * rows, state, chunks)
    placed = jax.device_put(np.full((rows, 1), root, np.int32), target.sharding.named("batch", None))
    return np.asarray(_root_logits(target, params, state, placed))
