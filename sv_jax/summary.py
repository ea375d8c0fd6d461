"""What a run measured, in lines for a person."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sv_jax.sampling_params import GREEDY, SamplingParams

if TYPE_CHECKING:  # importing the engine imports JAX, which --help must not wait for
    from sv_jax.engine import LosslessReport
    from sv_jax.sparsity.config import SparsityConfig

BAR_WIDTH = 40
GREEDY_LAW = "the output equals plain greedy decoding up to near-ties"
SAMPLED_LAW = "the output follows the law of plain sampling"
LONGEST_WORD, LONGEST_LIST = 16, 3  # of a provenance: hashes are cut, longer lists counted


def jsonable(value: Any) -> Any:
    """`value` without NaN and infinities, which JSON does not have: they become null."""
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary_lines(stats: Mapping[str, Any], rows: int, sampling: SamplingParams = GREEDY) -> list[str]:
    """The summary of GenerationStats.as_dict(), and how tokens were chosen."""
    lines = [
        ("tokens", f"{stats['emitted_tokens']} in {rows} {'rows' if rows > 1 else 'row'}"),
        ("speed", f"{_number(stats['tokens_per_second'], 1)} tokens/s"),
        ("latency", _latency(stats)),
        ("acceptance", f"{_number(stats['mean_acceptance_length'], 2)} tokens per row and step on average"),
        ("drafts", _drafts(stats)),
        ("steps", f"{stats['verify_steps']} verify steps, {stats['plain_steps']} of them without any draft"),
        ("startup", f"compile {_number(stats['compile_seconds'], 1)} s, "
                    f"load {_number(stats['load_seconds'], 1)} s"),
    ]  # fmt: skip
    if sampling != GREEDY:
        lines.insert(0, ("sampling", sampling_settings(sampling)))
    attention, ffn = stats["sparse_attention"], stats["sparse_ffn"]
    if attention is not None:
        lines.append(("cache reads", _cache_reads(attention)))
    if ffn is not None:
        lines += _ffn_reads(ffn)
    text = [f"{name:<11} {value}" for name, value in lines]
    return [*text, *histogram_lines(stats["acceptance_histogram"]), law_line(sampling, attention, ffn)]


def law_line(
    sampling: SamplingParams, attention: Mapping[str, Any] | None, ffn: Mapping[str, Any] | None = None
) -> str:
    """How the text relates to plain decoding's.

    attention, ffn: of SparseAttentionStats and SparseFFNStats; None: dense.
    """
    law = GREEDY_LAW if sampling.greedy else SAMPLED_LAW
    if attention is None and ffn is None:
        return f"verification was dense (every cached position was read), so {law}"
    lost = []
    if attention is not None and (sparse := attention["sparse_row_steps"]):
        share = _percent(sparse / attention["row_steps"])
        lost.append(f"{sparse} of {attention['row_steps']} row-steps ({share}) left a part of the cache out")
    if ffn is not None and (sparse := ffn["sparse_steps"]):
        share = _percent(sparse / ffn["steps"])
        lost.append(f"{sparse} of {ffn['steps']} steps ({share}) left a part of the feed-forward weights out")
    if lost:
        return (
            f"verification was sparse, which is lossy: {', '.join(lost)}; the output may differ from plain "
            "decoding"
        )
    if ffn is None:
        return f"verification was sparse, but no step had so much context that it left any out, so {law}"
    return f"verification was sparse, but no step left anything out, so {law}"


def provenance_lines(sparsity: SparsityConfig, sha256: str | None) -> list[str]:
    """Where the figures of a sparsity file come from, if it says so, and whether that was another model.

    Args:
      sha256: of the file that the model's weights come from; None: unknown.
    """
    provenance = dict(sparsity.provenance)
    if not provenance:
        return []
    told = ", ".join(f"{key} {_beginning(value)}" for key, value in provenance.items())
    lines = [f"  the sparsity file says where its figures come from: {told}"]
    named = provenance.get("model_sha256")
    if named is not None and sha256 is not None and named != sha256:
        lines.append(
            f"warning: the sparsity file is about another model: model_sha256 {_beginning(named)}, "
            f"but this one's is {_beginning(sha256)}"
        )
    return lines


def _beginning(value: Any) -> str:
    if isinstance(value, list) and len(value) > LONGEST_LIST:
        return f"({len(value)} of them)"
    words = str(value).split()
    return " ".join(word if len(word) <= LONGEST_WORD else word[: LONGEST_WORD - 1] + "…" for word in words)


def sampling_settings(sampling: SamplingParams) -> str:
    """Temperature and seed, and what else is not at its default; greedy runs have no use for either."""
    named = []
    for name, value in dataclasses.asdict(sampling).items():
        if name not in ("temperature", "seed") and value != getattr(GREEDY, name):
            shown = f"{value:g}" if isinstance(value, float) else value
            named.append(f"{name.replace('_', '-')} {shown}")
    if sampling.greedy:
        return ", ".join(["greedy", *named])
    return ", ".join([f"temperature {sampling.temperature:g}", *named, f"seed {sampling.seed}"])


def histogram_lines(histogram: Sequence[int]) -> list[str]:
    """One bar per number of tokens, up to the largest that occurred; histogram[i] row-steps emitted i + 1."""
    total, most = sum(histogram), max(histogram, default=0)
    if not total:
        return []
    lines = ["row-steps by tokens emitted:"]
    last = max(i for i, count in enumerate(histogram) if count)
    for i, count in enumerate(histogram[: last + 1]):
        # A count that is not zero is visible.
        bar = "#" * math.ceil(BAR_WIDTH * count / most)
        lines.append(f"{i + 1:>11} {bar:<{BAR_WIDTH}} {count} ({100 * count / total:.0f} %)")
    return lines


def lossless_lines(report: LosslessReport) -> list[str]:
    """The comparison with plain decoding; each divergence with how close the two tokens were."""
    lines = [f"compared with plain decoding: {report.identical_rows} of {report.rows} rows are identical"]
    for d in report.divergences:
        lines.append(
            f"row {d.row + 1} differs at output token {d.index}: speculative {d.speculative_token}, "
            f"plain {d.plain_token}, top-2 gap {d.top2_gap:.2e}"
        )
    verdict = "lossless" if report.lossless else "NOT lossless: a divergence is no near-tie"
    if report.interrupted:
        verdict += " (as far as the comparison got; it was interrupted)"
    return [*lines, verdict]


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None or not math.isfinite(value) else f"{100 * value:.0f} %"


def _latency(stats: Mapping[str, Any]) -> str:
    first, later = stats["ttft_seconds"], stats["tpot_seconds"]
    per_token = None if later is None else 1000 * later
    return f"first token (TTFT) {_number(first, 2)} s, each further one (TPOT) {_number(per_token, 1)} ms"


def _cache_reads(reads: Mapping[str, Any]) -> str:
    names = ("kv_blocks", "dense_kv_blocks", "bytes", "dense_bytes")
    values = [reads[f"{name}_per_token"] for name in names]
    if None in values:
        return "none"
    blocks, dense_blocks, size, dense_size = values
    return (
        f"{blocks:.1f} KV blocks ({size / 1e6:.1f} MB) per token; dense: {dense_blocks:.1f} "
        f"({dense_size / 1e6:.1f} MB)"
    )


def _ffn_reads(reads: Mapping[str, Any]) -> list[tuple[str, str]]:
    size, dense_size = reads["bytes_per_token"], reads["dense_bytes_per_token"]
    if size is None:
        return [("FFN reads", "none")]
    lines = [("FFN reads", f"{size / 1e6:.1f} MB of weights per token; dense: {dense_size / 1e6:.1f} MB")]
    if (experts := reads["experts_per_token"]) is not None:
        text = f"{experts:.1f} of {reads['dense_experts_per_token']:.1f} per token, over layers"
        lines.append(
            ("experts", f"{text}; {_percent(reads['kept_expert_share'])} of the routers' choices kept")
        )
    if (density := reads["channel_density"]) is not None:
        union = _percent(reads["channel_union"])
        lines.append(
            ("channels", f"{_percent(density)} used by a token, {union} by the tokens of a step together")
        )
    return lines


def _drafts(stats: Mapping[str, Any]) -> str:
    rate, coverage = stats["draft_acceptance_rate"], stats["draft_coverage"]
    if rate is None:
        return "none"
    return f"{_percent(rate)} of drafted tokens accepted; {_percent(coverage)} of row-steps had a draft"
