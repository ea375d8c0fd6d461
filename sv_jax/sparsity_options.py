"""The options of sparse verification: from the command line and a file to what the engine is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sv_jax.config import UserError
from sv_jax.option_table import declare, flag, override
from sv_jax.sparsity.config import RANGES, SCORES, AttentionSparsity, SparsityConfig, read_sparsity

if TYPE_CHECKING:
    from sv_jax.options import GenerateOptions

ATTENTION = tuple(field.name for field in dataclasses.fields(AttentionSparsity))
SPARSE_ONLY = ("sparsity", *ATTENTION)  # options that dense verification does not read


def attention_option(name: str, metavar: str | None, help: str) -> Any:
    """A field of AttentionSparsity as an option: None unless it is given, so that a file's value counts."""
    default = getattr(AttentionSparsity, name)
    if default not in (None, ()):
        help += f" (default: {default})"
    if name in RANGES:
        kind = "number" if RANGES[name].type is int else "real"
        return declare(None, kind, help, metavar=metavar, range=RANGES[name])  # type: ignore[arg-type]
    if name == "score":
        return declare(None, "text", help, choices=SCORES)
    return declare(None, "layers", help, metavar=metavar)


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
    config = SparsityConfig() if options.sparsity is None else read_sparsity(options.sparsity)
    in_file, given = (
        {name: value for name in ATTENTION if (value := getattr(source, name)) is not None}
        for source in (config.attention, options)
    )
    return dataclasses.replace(config, attention=AttentionSparsity(**override(in_file, given)))
