"""The sparsity that the scripts measure: a file's, and options that win over it."""

from __future__ import annotations

import argparse
import dataclasses

from sv_jax.sparsity.config import BLOCK_SIZES, SCORES, AttentionSparsity, read_sparsity


def add_sparsity_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sparsity", default=None, metavar="F.toml", help="anchors, dense layers, score, ..")
    parser.add_argument("--block-size", type=int, default=None, choices=BLOCK_SIZES)
    parser.add_argument("--score", default=None, choices=SCORES)


def sparsity_from(arguments: argparse.Namespace) -> AttentionSparsity:
    """What the options say; budgets are up to the caller."""
    in_file = None if arguments.sparsity is None else read_sparsity(arguments.sparsity).attention
    base = in_file or AttentionSparsity()
    given = {name: getattr(arguments, name) for name in ("block_size", "score")}
    return dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})
