"""The options of `python -m sv_jax.generate`: one table makes the command line and reads the TOML file."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.platform import IMPLEMENTATIONS
from sv_jax.config import EXPERT_SHARDS, KV_SHARDS, Range, UserError
from sv_jax.option_parser import build_parser as table_parser
from sv_jax.option_parser import options_of, parse_given
from sv_jax.option_table import (
    Kind,
    Option,
    at_least,
    check_exclusive,
    check_value,
    declare,
    flag,
    override,
)
from sv_jax.planning.hardware import PLATFORMS
from sv_jax.sampling_params import GREEDY, RANGES, SamplingParams
from sv_jax.sparsity.config import PAPER_L0, PAPER_RHO
from sv_jax.sparsity.ffn_config import CHANNEL_RULES, EXPERT_RANGES, KEEP, OUTSIDE, READINGS, THRESHOLD
from sv_jax.sparsity_options import (
    SPARSE_ONLY,
    attention_option,
    refuse_what_dense_ignores,
    sparse_option,
)
from sv_jax.text_output import MARKS


def _sampling_option(name: str, metavar: str, help: str) -> Any:
    limits = RANGES[name]
    kind: Kind = "number" if limits.type is int else "real"
    return declare(getattr(GREEDY, name), kind, help, metavar=metavar, range=limits)


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Everything that a run of the command line needs, with its defaults."""

    model: str = declare(
        "smollm2-135m",
        "text",
        "a registry name, a Hugging Face directory, a .gguf file, or a hub id org/name",
        metavar="M",
    )
    prompt: tuple[str, ...] = declare(
        (), "texts", "a prompt; repeat it for several (default: four built-in prompts)", metavar="P"
    )
    prompt_file: str | None = declare(
        None,
        "text",
        "prompts from a UTF-8 file, one a line, blank lines are skipped; - is standard input",
        metavar="F",
    )
    chat: bool | None = declare(
        None, "flag", "put prompts into the chat template (default: where the model has one)"
    )
    mesh: str = declare("1x1", "text", "devices as DATAxMODEL, such as 4x2; emulated on CPU", metavar="DxM")
    kv_shard: str = declare(
        "none",
        "text",
        "data: the data axis cuts the KV cache over its length, not the batch; for few long rows",
        choices=KV_SHARDS,
    )
    expert_shard: str = declare(
        "model",
        "text",
        "all: experts are cut over all devices, not over the model axis",
        choices=EXPERT_SHARDS,
    )
    max_new_tokens: int = declare(
        128, "number", "tokens generated per prompt", metavar="N", range=at_least(1)
    )
    min_new_tokens: int = declare(
        0, "number", "no end-of-sequence token before that many tokens", metavar="N", range=at_least(0)
    )
    stop: tuple[str, ...] = declare(
        (), "texts", "a text that ends the output; repeat it for several", metavar="S", blank=True
    )
    include_stop: bool = declare(False, "flag", "leave the stop text in the output")
    temperature: float = _sampling_option(
        "temperature", "T", "0 takes the most likely token, above 0 samples"
    )
    top_k: int = _sampling_option("top_k", "N", "sample from the N most likely tokens; 0: from all")
    top_p: float = _sampling_option(
        "top_p", "P", "sample from the fewest most likely tokens that make up P; 1: from all"
    )
    min_p: float = _sampling_option(
        "min_p", "P", "sample from tokens at least P times as likely as the most likely; 0: from all"
    )
    seed: int = _sampling_option("seed", "N", "of sampling: the same seed, the same text")
    repetition_penalty: float = _sampling_option(
        "repetition_penalty", "X", "above 1 makes tokens of prompt and output less likely"
    )
    presence_penalty: float = _sampling_option(
        "presence_penalty", "X", "above 0 makes tokens of the output less likely, once"
    )
    frequency_penalty: float = _sampling_option(
        "frequency_penalty", "X", "above 0 makes tokens of the output less likely, each time"
    )
    num_speculative_tokens: int | str = declare(
        7,
        "number",
        "drafted tokens per step, a step verifies one more; auto: as many as pay",
        metavar="K",
        range=at_least(0),
        choices=("auto",),
    )
    draft_method: str = declare(
        "prompt-lookup", "text", "where drafts come from", choices=("prompt-lookup", "none")
    )
    verify: str = declare(
        "dense",
        "text",
        "sparse reads less of the KV cache, or of the weights, which may change the text (lossy)",
        choices=("dense", "sparse"),
    )
    sparsity: str | None = declare(
        None,
        "text",
        "with --verify sparse: what is read, from a TOML file such as those in configs/sparsity; each of the "
        "options below wins over it",
        metavar="F.toml",
    )
    l0: int | None = attention_option(
        "l0", "N", f"tokens of context up to which all is read (default: {PAPER_L0}; with --keep 0)"
    )
    rho: float | None = attention_option(
        "rho", "X", f"share that is read of the tokens beyond (default: {PAPER_RHO:g})"
    )
    keep: float | None = attention_option("keep", "X", "in place of both: share of the context that is read")
    block_size: int | None = attention_option(
        "block_size", "N", "tokens of a block, which is read or left out"
    )
    sink_blocks: int | None = attention_option("sink_blocks", "N", "first blocks that are always read")
    local_blocks: int | None = attention_option("local_blocks", "N", "last blocks that are always read")
    score: str | None = attention_option(
        "score",
        None,
        "how other blocks are ranked: by their mean key (the paper), by a bound of their keys, or by the "
        "attention mass that a step's tokens would pay them",
    )
    anchors: tuple[int, ...] | None = attention_option(
        "anchors",
        "I,J,..",
        "layers that choose blocks; others take the choice of the last one before (default: all choose)",
    )
    dense_layers: tuple[int, ...] | None = attention_option(
        "dense_layers", "I,J,..", "layers that read everything (default: none)"
    )
    ffn_rule: str | None = sparse_option(
        None,
        "channels of feed-forward networks that are left out: of each token those with a small |silu(gate)| "
        "(the paper) or a small |silu(gate) * up|, or of all tokens of a step together the least ones",
        choices=CHANNEL_RULES,
    )
    ffn_threshold: float | None = sparse_option(
        "X", "with the rules gate and product: what is small, in every layer", range=THRESHOLD
    )
    ffn_keep: float | None = sparse_option(
        "X", "with the rule shared: share of the channels that is read", range=KEEP
    )
    experts_per_token: int | None = sparse_option(
        "N", "experts that a token goes to, fewer than the model's", range=EXPERT_RANGES["experts_per_token"]
    )
    skip_experts: int | None = sparse_option(
        "N",
        "most experts of little weight that a token skips, by the betas of the --sparsity file",
        range=EXPERT_RANGES["max_skipped"],
    )
    skip_reading: str | None = sparse_option(
        None,
        "how many of the betas have to say so: all up to the number skipped, or its own",
        choices=READINGS,
    )
    expert_shortlist: int | None = sparse_option(
        "N",
        "experts of a layer that all tokens of a step share, those with most router weight",
        range=EXPERT_RANGES["shortlist"],
    )
    shortlist_outside: str | None = sparse_option(
        None,
        "what becomes of a token's experts outside of the shortlist: dropped, or replaced from inside",
        choices=OUTSIDE,
    )
    expert_capacity: float | None = sparse_option(
        "X",
        "most tokens of a step that an expert takes, in even shares; others lose it (default: all are taken)",
        range=EXPERT_RANGES["capacity_factor"],
    )
    dtype: str | None = declare(
        None,
        "text",
        "of weights and cache (default: float32 on CPU, bfloat16 elsewhere)",
        choices=("float32", "bfloat16"),
    )
    implementation: str | None = declare(
        None,
        "text",
        "what attends to the KV cache in verify steps (default: what the platform runs best)",
        choices=IMPLEMENTATIONS,
    )
    max_model_len: int | None = declare(
        None,
        "number",
        "tokens of prompt and output together (default: the model's)",
        metavar="N",
        range=at_least(2),
    )
    max_batch_size: int = declare(16, "number", "prompts decoded at a time", metavar="B", range=at_least(1))
    ignore_eos: bool = declare(False, "flag", "go on after an end-of-sequence token")
    check_lossless: bool = declare(
        False, "flag", "also decode plainly and compare; a difference beyond near-ties exits with 1"
    )
    logprobs: int = declare(
        0,
        "number",
        "with --json: log-probabilities of each token and of the N most likely ones",
        metavar="N",
        range=Range(int, lambda value: 0 <= value <= 20, "a whole number from 0 to 20"),
    )
    json: bool = declare(
        False, "flag", "end standard output with one JSON object; all else goes to standard error"
    )
    stream: bool = declare(True, "flag", "print text while it is generated")
    cache_dir: str | None = declare(
        None, "text", "where fetched and converted weights go (default: the user's cache)", metavar="DIR"
    )
    plan_only: bool = declare(
        False,
        "flag",
        "run nothing: from the config of --model alone (a directory, a config.json, llama-3.1-8b or "
        "qwen3-30b-a3b) say whether it fits the chips of --platform, and what a step must read there",
    )
    platform: str | None = declare(
        None, "text", "with --plan-only: the chips of the mesh", choices=tuple(PLATFORMS)
    )
    compile_check: bool = declare(
        True,
        "flag",
        "with --plan-only: also compile the loop for the chips, where their compiler is installed",
    )
    batch_size: int | None = declare(
        None,
        "number",
        "with --plan-only: rows that are decoded together (default: as --max-batch-size)",
        metavar="B",
        range=at_least(1),
    )

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**{name: getattr(self, name) for name in RANGES})


OPTIONS: dict[str, Option] = options_of(GenerateOptions)


def build_parser() -> argparse.ArgumentParser:
    """The command line; options that are not given leave no trace, so that a TOML file can set them."""
    parser = table_parser(
        GenerateOptions,
        prog="python -m sv_jax.generate",
        description="Generates text with speculative decoding: what the model alone would write.",
        epilog=MARKS,
    )
    parser.add_argument(
        "--config", metavar="F.toml", help="a TOML file with any of these options; the command line wins"
    )
    return parser


def read_toml(path: str) -> dict[str, Any]:
    """Options of a TOML file, by field name; keys may be written with dashes or underscores.

    Raises UserError for a file that cannot be read, an unknown key, or a value that is not allowed.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path!r}: {error.strerror}; allowed: a TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"--config {path!r} is not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise UserError(f"--config {path!r}: unknown key {key!r}; allowed: {', '.join(OPTIONS)}")
        if name in values:
            raise UserError(f"--config {path!r}: {key!r} is there twice, with dashes and with underscores")
        values[name] = check_value(OPTIONS[name], value, f"--config {path!r}: {key} =")
    check_exclusive(values, f"--config {path!r}")
    return values


def parse_options(arguments: Sequence[str] | None = None) -> GenerateOptions:
    """Defaults, then the TOML file's values, then the command line's. Raises UserError for bad input."""
    command = parse_given(build_parser(), GenerateOptions, arguments)
    config = command.pop("config", None)
    check_exclusive(command, "the command line")
    values = read_toml(config) if config is not None else {}
    if command.get("verify") == "dense":  # switches a TOML file's sparse verification off
        values = {name: value for name, value in values.items() if name not in SPARSE_ONLY}
    options = GenerateOptions(**override(values, command))
    refuse_what_dense_ignores(options, command, f"--config {config!r}")
    if options.min_new_tokens > options.max_new_tokens:
        raise UserError(
            f"{flag('min_new_tokens')} {options.min_new_tokens} is not allowed; "
            f"allowed: at most {flag('max_new_tokens')}, {options.max_new_tokens}"
        )
    return options
