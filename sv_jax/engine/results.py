"""What a call of `generate` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from sv_jax.engine.ffn_reads import FFNCounts
from sv_jax.engine.settings import Settings
from sv_jax.engine.trace import ReadCounts, StepCounts

FinishReason = Literal["stop", "length", "interrupted"]


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an output token under the model's own law (no penalties, temperature or filters)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # (token id, log-probability) of the most likely tokens, descending


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """One prompt's output.

    An EOS id is in token_ids, never in text. A stop string ends token_ids with the token that completes it
    and text before it.
    """

    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason  # "interrupted": the caller's should_stop ended the run
    logprobs: list[TokenLogprob] | None = None  # one per token; None: not asked for


@dataclasses.dataclass(frozen=True)
class BatchOutcome:
    """What one batch emitted and counted, without the rows that pad it."""

    outputs: list[RequestOutput]
    counts: StepCounts
    first_token_seconds: float  # these three without compilation
    decode_seconds: float
    row_decode_seconds: list[float]  # first token to last, as seen between slices
    reads: ReadCounts | None = None  # None: attention was dense
    ffn_reads: FFNCounts | None = None  # None: feed-forward networks and experts were dense


@dataclasses.dataclass(frozen=True)
class SparseAttentionStats:
    """What sparse verification read of the KV cache, beside what dense verification would have.

    Blocks are summed over layers and KV heads; "per token" is per token that a step emitted, None where there
    was no step.
    """

    row_steps: int
    sparse_row_steps: int  # left blocks out: without any of these nothing was lost
    kv_blocks_per_token: float | None
    dense_kv_blocks_per_token: float | None
    bytes_per_token: float | None  # K and V of the blocks read, and the summaries that chose them
    summary_bytes_per_token: float | None  # these summaries alone
    dense_bytes_per_token: float | None  # K and V of every committed position


@dataclasses.dataclass(frozen=True)
class SparseFFNStats:
    """What sparse verification read of the feed-forward weights, beside what dense verification would have.

    A step's rows share what it reads, so that these are sums over steps. "Per token" is per token that a step
    emitted, None where there was no step. Experts are counted once a step and layer.
    """

    steps: int
    sparse_steps: int  # left channels or experts out: without any of these nothing was lost
    experts_per_token: float | None  # None: the model has no experts
    dense_experts_per_token: float | None
    kept_expert_share: float | None  # of the pairs of a token and an expert that its router chose
    channel_density: float | None  # of the channels of each token, those used; None: no layer leaves any out
    channel_union: float | None  # of the channels, those that some token of the step uses
    bytes_per_token: float | None  # weights of networks and experts
    dense_bytes_per_token: float | None


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Counts and times of one call. No time includes compilation; compile_seconds has it apart.

    The token that a prefill emits counts in emitted_tokens, not in acceptance.
    """

    emitted_tokens: int
    tokens_per_second: float | None  # decode tokens of all rows over decode seconds; None: no step was run
    ttft_seconds: float  # start of the call to the first token of the first batch
    tpot_seconds: float | None  # decode seconds over decode tokens of a row, mean over rows
    mean_acceptance_length: float | None  # emitted tokens per row and step, bonus included
    acceptance_histogram: list[int]  # index i: row-steps that emitted i + 1 tokens
    draft_acceptance_rate: float | None  # accepted / drafted; None: nothing was drafted
    draft_coverage: float | None  # share of row-steps with a draft
    verify_steps: int  # target passes after prefill
    plain_steps: int  # those of them that no row had a draft for
    compile_seconds: float
    load_seconds: float
    sparse_attention: SparseAttentionStats | None = None  # None: attention was dense
    sparse_ffn: SparseFFNStats | None = None  # None: feed-forward networks and experts were dense

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    outputs: list[RequestOutput]
    stats: GenerationStats
    settings: Settings  # what was asked for
    interrupted: bool = False


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def summarise(
    outcomes: Sequence[BatchOutcome], compile_seconds: float, load_seconds: float
) -> GenerationStats:
    """The figures of all batches of a call together."""
    counts = [outcome.counts for outcome in outcomes]
    size = max(len(c.histogram) for c in counts)
    histogram = np.sum([np.pad(c.histogram, (0, size - len(c.histogram))) for c in counts], axis=0)
    row_steps = int(histogram.sum())
    emitted_by_steps = int((histogram * np.arange(len(histogram))).sum())
    decode_seconds = sum(outcome.decode_seconds for outcome in outcomes)
    drafted = sum(c.drafted for c in counts)
    pace = [
        seconds / (len(output.token_ids) - 1)
        for outcome in outcomes
        for output, seconds in zip(outcome.outputs, outcome.row_decode_seconds)
        if len(output.token_ids) > 1
    ]
    return GenerationStats(
        emitted_tokens=sum(len(output.token_ids) for outcome in outcomes for output in outcome.outputs),
        tokens_per_second=_ratio(emitted_by_steps, decode_seconds) if emitted_by_steps else None,
        ttft_seconds=outcomes[0].first_token_seconds,
        tpot_seconds=_ratio(sum(pace), len(pace)),
        mean_acceptance_length=_ratio(emitted_by_steps, row_steps),
        acceptance_histogram=histogram[1:].tolist(),
        draft_acceptance_rate=_ratio(sum(c.accepted for c in counts), drafted),
        draft_coverage=_ratio(sum(c.steps_with_draft for c in counts), row_steps),
        verify_steps=sum(c.steps for c in counts),
        plain_steps=sum(c.plain_steps for c in counts),
        compile_seconds=compile_seconds,
        load_seconds=load_seconds,
        sparse_attention=summarise_reads([o.reads for o in outcomes if o.reads is not None]),
        sparse_ffn=summarise_ffn([o.ffn_reads for o in outcomes if o.ffn_reads is not None]),
    )


def summarise_reads(batches: Sequence[ReadCounts]) -> SparseAttentionStats | None:
    """The reads of all batches together; None for no batch, where verification was dense."""
    if not batches:
        return None
    total = sum(batches[1:], batches[0])
    return SparseAttentionStats(
        row_steps=total.row_steps,
        sparse_row_steps=total.sparse_row_steps,
        kv_blocks_per_token=_ratio(total.kv_blocks, total.tokens),
        dense_kv_blocks_per_token=_ratio(total.dense_kv_blocks, total.tokens),
        bytes_per_token=_ratio(total.kv_bytes + total.summary_bytes, total.tokens),
        summary_bytes_per_token=_ratio(total.summary_bytes, total.tokens),
        dense_bytes_per_token=_ratio(total.dense_bytes, total.tokens),
    )


def summarise_ffn(batches: Sequence[FFNCounts]) -> SparseFFNStats | None:
    """The reads of all batches together; None for no batch, where nothing of this was sparse."""
    if not batches:
        return None
    total = sum(batches[1:], batches[0])
    experts, channels, tokens = total.experts, total.channels, total.tokens
    return SparseFFNStats(
        steps=total.steps,
        sparse_steps=total.sparse_steps,
        experts_per_token=None if experts is None else _ratio(float(experts.read), tokens),
        dense_experts_per_token=None if experts is None else _ratio(float(experts.wanted), tokens),
        kept_expert_share=None if experts is None else _ratio(float(experts.kept), float(experts.pairs)),
        channel_density=None if channels is None else _ratio(float(channels.used), float(channels.most_used)),
        channel_union=None if channels is None else _ratio(float(channels.wanted), float(channels.held)),
        bytes_per_token=_ratio(total.weight_bytes, tokens),
        dense_bytes_per_token=_ratio(total.dense_weight_bytes, tokens),
    )
