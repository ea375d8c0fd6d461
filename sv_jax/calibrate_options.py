"""The options of `python -m sv_jax.calibrate`."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sv_jax.config import Range, UserError
from sv_jax.option_parser import build_parser, parse_given
from sv_jax.option_table import Option, at_least, declare, flag
from sv_jax.sampling_params import RANGES as SAMPLING_RANGES
from sv_jax.sparsity.config import RANGES, SCORES, AttentionSparsity
from sv_jax.sparsity.ffn_config import KEEP, READINGS

PROGRAM = "python -m sv_jax.calibrate"
PARTS = ("attention", "ffn", "experts")
METHODS = ("damage", "jaccard")
# On smollm2-135m (2k, blocks of 32, a quarter kept) 0.01 nats are 8 of 30 anchors. Up to 0.1 nats, 5 anchors,
# copies of other documents drift no more than with a choice in every layer; a similarity of 0.75 takes 14.
TOLERANCES = {"damage": 0.01, "jaccard": 0.75}
MOST_DENSE = {"damage": 2, "jaccard": 0}
BY_METHOD: Mapping[str, Mapping[str, Any]] = {"tolerance": TOLERANCES, "max_dense_layers": MOST_DENSE}
DEFAULT = AttentionSparsity()


@dataclasses.dataclass(frozen=True)
class CalibrateOptions:
    """Everything that a calibration needs, with its defaults."""

    output: str = dataclasses.field(
        metadata={
            "option": Option(
                "text",
                "the sparsity file to be written, such as configs/sparsity/NAME.toml; what is measured lies "
                "beside it until it is there",
                metavar="F.toml",
            )
        }
    )
    force: bool = declare(False, "flag", "overwrite the file if it is there")
    model: str = declare(
        "smollm2-135m",
        "text",
        "a registry name, a Hugging Face directory, a .gguf file, or a hub id org/name",
        metavar="M",
    )
    part: str = declare(
        "attention",
        "text",
        "what is calibrated: the layers that choose blocks, the thresholds of feed-forward networks, or the "
        "betas by which tokens skip experts",
        choices=PARTS,
    )
    sparsity: str | None = declare(
        None, "text", "a sparsity file whose other parts are written, too", metavar="F.toml"
    )
    density: float = declare(
        0.5, "real", "with --part ffn: share of the channels that a token uses", metavar="X", range=KEEP
    )
    ffn_rule: str = declare(
        "gate", "text", "with --part ffn: what has to be above the threshold", choices=("gate", "product")
    )
    one_threshold: bool = declare(False, "flag", "with --part ffn: one for all layers")
    max_skipped: int = declare(
        2, "number", "with --part experts: most experts that a token skips", metavar="N", range=at_least(1)
    )
    skip_reading: str = declare(
        "first",
        "text",
        "with --part experts: how many of the betas have to say so, all up to the number skipped, or its own",
        choices=READINGS,
    )
    skip_rate: float | None = declare(
        None,
        "real",
        "with --part experts: share of the experts that is skipped (default: betas are medians, as in the "
        "paper)",
        metavar="X",
        range=Range(float, lambda value: 0 < value < 1, "a number above 0 and below 1"),
    )
    keep: float = declare(
        0.25, "real", "share of the context that is read", metavar="X", range=RANGES["keep"]
    )
    block_size: int = declare(
        DEFAULT.block_size,
        "number",
        "tokens of a block, which is read or left out",
        metavar="N",
        range=RANGES["block_size"],
    )
    score: str = declare(DEFAULT.score, "text", "how blocks are ranked", choices=SCORES)
    sink_blocks: int = declare(
        DEFAULT.sink_blocks,
        "number",
        "first blocks that are always read",
        metavar="N",
        range=RANGES["sink_blocks"],
    )
    local_blocks: int = declare(
        DEFAULT.local_blocks,
        "number",
        "last blocks that are always read",
        metavar="N",
        range=RANGES["local_blocks"],
    )
    method: str = declare(
        "damage",
        "text",
        "what reuse of a layer's blocks costs: the damage to the output, or, much faster, what the sets of "
        "two layers lack in Jaccard similarity",
        choices=METHODS,
    )
    max_anchors: int | None = declare(
        None, "number", "most anchors (default: half of the layers)", metavar="N", range=at_least(1)
    )
    tolerance: float | None = declare(
        None,
        "real",
        "the fewest anchors are taken whose predicted KL from reuse is at most X nats, with jaccard those "
        "whose blocks are similar to each layer's own by X on average (default: "
        + ", ".join(f"{method} {value:g}" for method, value in TOLERANCES.items())
        + ")",
        metavar="X",
        range=Range(float, lambda value: value >= 0, "a number of at least 0"),
    )
    max_dense_layers: int | None = declare(
        None,
        "number",
        "most layers that read everything, those in which leaving blocks out does most of the damage "
        "(default: " + ", ".join(f"{method} {number}" for method, number in MOST_DENSE.items()) + ")",
        metavar="N",
        range=at_least(0),
    )
    dense_gain: float = declare(
        0.2,
        "real",
        "a layer reads everything if that takes away at least this share of the KL",
        metavar="X",
        range=Range(float, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    )
    reach: int = declare(
        8, "number", "layers that an anchor may lie before a layer", metavar="N", range=at_least(1)
    )
    context: int = declare(4096, "number", "tokens of each text", metavar="N", range=at_least(2))
    limit: int = declare(8, "number", "most texts", metavar="N", range=at_least(1))
    texts: str | None = declare(
        None,
        "text",
        'texts from a file, one JSON object {"text": ..} a line (default: built-in ones that quote '
        "themselves)",
        metavar="F.jsonl",
    )
    seed: int = declare(
        0, "number", "of where the built-in texts are cut", metavar="N", range=SAMPLING_RANGES["seed"]
    )
    num_speculative_tokens: int = declare(
        7, "number", "drafted tokens per step, a step verifies one more", metavar="K", range=at_least(0)
    )
    batch_size: int = declare(4, "number", "texts that run side by side", metavar="B", range=at_least(1))
    mesh: str = declare("1x1", "text", "devices as DATAxMODEL, such as 4x2; emulated on CPU", metavar="DxM")
    dtype: str | None = declare(
        None,
        "text",
        "of weights and cache (default: float32 on CPU, bfloat16 elsewhere)",
        choices=("float32", "bfloat16"),
    )
    cache_dir: str | None = declare(
        None, "text", "where fetched and converted files go (default: the user's cache)", metavar="DIR"
    )

    @property
    def attention(self) -> AttentionSparsity:
        names = ("keep", "block_size", "score", "sink_blocks", "local_blocks")
        return AttentionSparsity(**{name: getattr(self, name) for name in names})

    def command(self) -> str:
        """The command line that says the same, as short as it can be."""
        words = [PROGRAM]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = BY_METHOD[field.name][self.method] if field.name in BY_METHOD else field.default
            if field.name != "force" and value != default:
                words += [flag(field.name), shlex.quote(str(value))]
        return " ".join(words)


def parse_options(arguments: Sequence[str] | None = None) -> CalibrateOptions:
    """Defaults under the command line. Raises UserError for bad input."""
    parser = build_parser(
        CalibrateOptions,
        prog=PROGRAM,
        description="Finds the layers that have to read everything and those whose choice of blocks others "
        "can reuse, or what feed-forward networks and experts can leave out, and writes a file for "
        "python -m sv_jax.generate --verify sparse --sparsity F.toml.",
    )
    options = CalibrateOptions(**parse_given(parser, CalibrateOptions, arguments))
    for name, defaults in BY_METHOD.items():
        if getattr(options, name) is None:
            options = dataclasses.replace(options, **{name: defaults[options.method]})
    assert options.tolerance is not None
    if options.method == "jaccard" and options.tolerance > 1:
        raise UserError(f"{flag('tolerance')} {options.tolerance:g} is not allowed; allowed: up to 1")
    return options
