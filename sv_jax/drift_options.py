"""The options of `python -m sv_jax.evaluate drift`, and the grid of settings that they name. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sv_jax.config import Range, UserError
from sv_jax.evaluation.user_texts import KINDS, UserText, read_texts
from sv_jax.option_parser import build_parser, parse_given
from sv_jax.option_table import at_least, declare, flag
from sv_jax.sparsity.config import RANGES, SCORES, AttentionSparsity, read_sparsity

CONTROLS = ("recent", "random", "oracle")
SELECTORS = (*SCORES, *CONTROLS)


@dataclasses.dataclass(frozen=True)
class DriftOptions:
    """Everything that a run needs, with its defaults; lists are still text."""

    model: str = declare(
        "smollm2-135m",
        "text",
        "a registry name, a Hugging Face directory, a .gguf file, or a hub id org/name",
        metavar="M",
    )
    kinds: str | None = declare(
        None,
        "text",
        f"built-in texts, some of {','.join(KINDS)} (default: all; with --texts none)",
        metavar="A,B,..",
    )
    texts: str | None = declare(
        None,
        "text",
        'texts of your own, a JSON object {"text": .., "kind"?: .., "name"?: ..} a line; of each the last '
        "tokens are measured",
        metavar="F.jsonl",
    )
    contexts: str = declare("4096", "text", "tokens of context that texts are cut to", metavar="N,M,..")
    limit: int = declare(24, "number", "most cases of each kind and context", metavar="N", range=at_least(1))
    block_sizes: str | None = declare(
        None, "text", "tokens of a block (default: 32,64; with --sparsity the file's)", metavar="N,M,.."
    )
    keep: str | None = declare(
        None,
        "text",
        "shares of the context that are read (default: 0.1,0.25,0.5; with --sparsity what the file says)",
        metavar="X,Y,..",
    )
    selectors: str | None = declare(
        None,
        "text",
        f"what ranks blocks, some of {','.join(SELECTORS)} (default: all; with --sparsity the file's score "
        f"and {','.join(CONTROLS)})",
        metavar="A,B,..",
    )
    sparsity: str | None = declare(
        None,
        "text",
        "a TOML file such as those in configs/sparsity: anchors, dense layers, ..",
        metavar="F.toml",
    )
    num_speculative_tokens: int = declare(
        7,
        "number",
        "a step verifies one token more, with one choice of blocks",
        metavar="K",
        range=at_least(0),
    )
    free_running: int = declare(
        0,
        "number",
        "also generate N tokens behind each ordinary or copied text, dense and sparse (0: do not)",
        metavar="N",
        range=at_least(0),
    )
    batch_size: int = declare(4, "number", "cases measured side by side", metavar="B", range=at_least(1))
    seed: int = declare(0, "number", "of texts and of the random control", metavar="N", range=at_least(0))
    mesh: str = declare("1x1", "text", "devices as DATAxMODEL, such as 4x2; emulated on CPU", metavar="DxM")
    dtype: str | None = declare(
        None,
        "text",
        "of weights and cache (default: float32 on CPU, bfloat16 elsewhere)",
        choices=("float32", "bfloat16"),
    )
    output: str = declare("drift", "text", "where results, tables and plots go", metavar="DIR")
    plots: bool = declare(True, "flag", "draw figures (needs matplotlib)")
    json: bool = declare(
        False, "flag", "end standard output with one JSON object; all else goes to standard error"
    )
    cache_dir: str | None = declare(
        None, "text", "where fetched weights and texts go (default: the user's cache)", metavar="DIR"
    )


@dataclasses.dataclass(frozen=True)
class DriftGrid:
    """What the options name: every attention with every selector, on every kind of text at every context."""

    kinds: tuple[str, ...]
    texts: tuple[UserText, ...]  # the user's
    contexts: tuple[int, ...]
    attentions: tuple[AttentionSparsity, ...]
    selectors: tuple[str, ...]


def parse_drift_options(arguments: Sequence[str] | None) -> tuple[DriftOptions, DriftGrid]:
    """What the command line asks for, the word "drift" included. Raises UserError for what is not allowed."""
    parser = build_parser(
        DriftOptions,
        prog="python -m sv_jax.evaluate",
        description="drift: how often sparse verification says what dense verification says, and what it "
        "reads for that. Results are kept as they come; the same command goes on where it was interrupted.",
    )
    parser.add_argument("what", metavar="drift", choices=("drift",), help="what is evaluated")
    given = parse_given(parser, DriftOptions, arguments)
    del given["what"]
    options = DriftOptions(**given)
    return options, read_grid(options)


def read_grid(options: DriftOptions) -> DriftGrid:
    """The lists of the options, and what is in the files that they name. Raises UserError."""
    texts = read_texts(options.texts) if options.texts is not None else ()
    kinds = () if options.kinds is None else _names("kinds", options.kinds, KINDS)
    base = AttentionSparsity()
    if options.sparsity is not None:
        in_file = read_sparsity(options.sparsity).attention
        if in_file is None:
            raise UserError(
                f"{flag('sparsity')} {options.sparsity!r} has no [attention]; allowed: a file with it"
            )
        base = in_file
    return DriftGrid(
        kinds=kinds or (() if texts else KINDS),
        texts=texts,
        contexts=_numbers("contexts", options.contexts, at_least(1)),
        attentions=_attentions(options, base),
        selectors=_selectors(options, base),
    )


def _attentions(options: DriftOptions, base: AttentionSparsity) -> tuple[AttentionSparsity, ...]:
    """Every block size with every budget; a file's own where the command line has none."""
    sizes: Sequence[int] = (base.block_size,) if options.sparsity else (32, 64)
    if options.block_sizes is not None:
        sizes = _numbers("block_sizes", options.block_sizes, RANGES["block_size"])
    if options.keep is None and options.sparsity is not None:
        return tuple(dataclasses.replace(base, block_size=size) for size in sizes)
    shares = (0.1, 0.25, 0.5)
    if options.keep is not None:
        shares = _numbers("keep", options.keep, RANGES["keep"])
    return tuple(
        dataclasses.replace(base, block_size=size, keep=share, rho=None, l0=None)
        for size in sizes
        for share in shares
    )


def _selectors(options: DriftOptions, base: AttentionSparsity) -> tuple[str, ...]:
    if options.selectors is not None:
        return _names("selectors", options.selectors, SELECTORS)
    return SELECTORS if options.sparsity is None else (base.score, *CONTROLS)


def _names(name: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    parts = _parts(name, text)
    for part in parts:
        if part not in allowed:
            raise UserError(f"{flag(name)} has {part!r}; allowed: {', '.join(allowed)}")
    return parts


def _numbers(name: str, text: str, limits: Range) -> tuple:
    numbers = []
    for part in _parts(name, text):
        try:
            number = limits.type(part)
        except ValueError as error:
            raise UserError(f"{flag(name)} has {part!r}; allowed: {limits.allowed}") from error
        numbers.append(limits.check(f"{flag(name)}:", number))
    return tuple(numbers)


def _parts(name: str, text: str) -> tuple[str, ...]:
    """What commas separate; each once."""
    parts = [part.strip() for part in text.split(",")]
    if len(set(parts)) < len(parts):
        raise UserError(f"{flag(name)} {text!r} names something twice; allowed: each once")
    return tuple(parts)
