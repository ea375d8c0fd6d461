"""The options of sparse verification: from the command line and a file to what the engine is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sv_jax.config import Range, UserError
from sv_jax.option_table import Kind, declare, flag, override
from sv_jax.sparsity.config import (
    PARTS,
    RANGES,
    SCORES,
    AttentionSparsity,
    SparsityConfig,
    make_sparsity,
    read_sparsity,
)
from sv_jax.sparsity.ffn_config import ChannelSparsity, ExpertSparsity

if TYPE_CHECKING:
    from sv_jax.options import GenerateOptions

ATTENTION = tuple(field.name for field in dataclasses.fields(AttentionSparsity))
# Options of the other parts, and the fields that they set.
FFN = {"ffn_rule": "rule", "ffn_threshold": "thresholds", "ffn_keep": "keep"}
EXPERTS = {
    "experts_per_token": "experts_per_token",
    "skip_experts": "max_skipped",
    "skip_reading": "reading",
    "expert_shortlist": "shortlist",
    "shortlist_outside": "outside",
    "expert_capacity": "capacity_factor",
}
SPARSE_ONLY = ("sparsity", *ATTENTION, *FFN, *EXPERTS)  # options that dense verification does not read


def attention_option(name: str, metavar: str | None, help: str) -> Any:
    """A field of AttentionSparsity as an option: None unless it is given, so that a file's value counts."""
    default = getattr(AttentionSparsity, name)
    if default not in (None, ()):
        help += f" (default: {default})"
    if name in RANGES:
        return sparse_option(metavar, help, range=RANGES[name])
    if name == "score":
        return sparse_option(metavar, help, choices=SCORES)
    return declare(None, "layers", help, metavar=metavar)


def sparse_option(
    metavar: str | None, help: str, *, range: Range | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """An option that is None unless it is given: a number, or one of some names."""
    kind: Kind = "text" if range is None else "number" if range.type is int else "real"
    return declare(None, kind, help, metavar=metavar, range=range, choices=choices)


def refuse_what_dense_ignores(options: GenerateOptions, command: Mapping[str, Any], config: str) -> None:
    """Raises UserError for an option of sparse verification where verification is dense.

    Args:
      command: what the command line gives. config: how to name the source of everything else.
    """
    if options.verify == "sparse":
        return
    for name in SPARSE_ONLY:
        if getattr(options, name) is not None:
            where = flag(name) if name in command else f"{config}: {name.replace('_', '-')}"
            raise UserError(f"{where} says how to verify sparsely; allowed: only with --verify sparse")


def read_sparsity_options(options: GenerateOptions) -> SparsityConfig | None:
    """What verification leaves out: the --sparsity file's values under those of the options; None: nothing.

    Raises UserError for a file that cannot be read or says what is not allowed.
    """
    if options.verify == "dense":
        return None
    config = None if options.sparsity is None else read_sparsity(options.sparsity)
    in_file = dict.fromkeys(PARTS) if config is None else {name: getattr(config, name) for name in PARTS}
    parts = {
        "attention": _attention(options, in_file["attention"]),
        "ffn": _ffn(options, in_file["ffn"]),
        "experts": _experts(options, in_file["experts"]),
    }
    return make_sparsity(parts, () if config is None else config.provenance)


def _given(options: GenerateOptions, fields: Mapping[str, str]) -> dict[str, Any]:
    """What the options say, by the fields that they set."""
    values = {field: getattr(options, name) for name, field in fields.items()}
    return {field: value for field, value in values.items() if value is not None}


def _in_file(part: Any) -> dict[str, Any]:
    if part is None:
        return {}
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: value for name, value in values.items() if value is not None}


def _attention(options: GenerateOptions, in_file: AttentionSparsity | None) -> AttentionSparsity | None:
    given = _given(options, {name: name for name in ATTENTION})
    return AttentionSparsity(**override(_in_file(in_file), given)) if given else in_file


def _ffn(options: GenerateOptions, in_file: ChannelSparsity | None) -> ChannelSparsity | None:
    given = _given(options, FFN)
    if not given:
        return in_file
    if "thresholds" in given:
        given["thresholds"] = (given["thresholds"],)
    values = _in_file(in_file) | given
    if "rule" not in given:  # a share is one rule's, and a threshold is of the others
        shared = "keep" in given
        values["rule"] = "shared" if shared else "product" if values.get("rule") == "product" else "gate"
    values.pop("thresholds" if values["rule"] == "shared" and "thresholds" not in given else "", None)
    values.pop("keep" if values["rule"] != "shared" and "keep" not in given else "", None)
    return ChannelSparsity(**values)


def _experts(options: GenerateOptions, in_file: ExpertSparsity | None) -> ExpertSparsity | None:
    given = _given(options, EXPERTS)
    return ExpertSparsity(**override(_in_file(in_file), given)) if given else in_file
