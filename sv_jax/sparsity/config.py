"""What a user may ask of sparse verification: checked numbers, from the command line or a TOML file. No JAX.

[attention]            # configs/sparsity/*.toml
keep = 0.25
block-size = 32
anchors = [0, 4, 8]

[ffn]                  # see ffn_config.py, as for [experts]
rule = "shared"
keep = 0.5

[provenance]           # written by `python -m sv_jax.calibrate`, shown at start, else not used
model = "..."
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sv_jax.config import Range, UserError, check_layers
from sv_jax.sparsity.ffn_config import ChannelSparsity, ExpertSparsity

BLOCK_SIZES = (16, 32, 64, 128)
SCORES = ("mean", "bound", "mass")
PAPER_L0, PAPER_RHO = 4096, 0.1
INT_MAX = 2**31 - 1


OPTIONAL = ("l0", "rho", "keep")
RANGES: dict[str, Range] = {
    "l0": Range(int, lambda value: 0 <= value <= INT_MAX, f"a whole number from 0 to {INT_MAX}"),
    "rho": Range(float, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "keep": Range(float, lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    "block_size": Range(int, lambda value: value in BLOCK_SIZES, ", ".join(map(str, BLOCK_SIZES))),
    "sink_blocks": Range(int, lambda value: 0 <= value <= INT_MAX, "a whole number of at least 0"),
    # The newest tokens have no say in their own block's summary before it is full.
    "local_blocks": Range(int, lambda value: 1 <= value <= INT_MAX, "a whole number of at least 1"),
}


@dataclasses.dataclass(frozen=True)
class AttentionSparsity:
    """Sparse attention (SA and SA* of arXiv 2512.21911). Lossy, unless the budget keeps everything.

    Of L committed tokens a KV head reads all while L <= l0, and above floor((L - l0) * rho + l0) of them, in
    whole blocks. `keep` stands in place of rho, with l0 = 0 unless it is given. Without any of the three:
    the paper's l0 = 4096 and rho = 0.1.

    Raises:
      UserError: a field is out of range, or both keep and rho are given.
    """

    l0: int | None = None
    rho: float | None = None
    keep: float | None = None
    block_size: int = 64
    sink_blocks: int = (
        1  # first blocks that are always read; inside the budget, and with the local ones its least
    )
    local_blocks: int = 2  # last blocks, the partly filled one included
    # How blocks are ranked: by the attention "mass" that all tokens of the step would pay, estimated (ours);
    # by the root's product with the "mean" key (the paper) or with a "bound" of the keys (Quest).
    score: str = "mass"
    anchors: tuple[int, ...] | None = None  # layers that select; others reuse the last one's set. None: all
    dense_layers: tuple[int, ...] = ()  # layers that read everything

    def __post_init__(self) -> None:
        for name, limits in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                object.__setattr__(self, name, limits.check(name.replace("_", "-"), value))
        if self.score not in SCORES:
            raise UserError(f"score {self.score!r} is not allowed; allowed: {', '.join(SCORES)}")
        if self.keep is not None and self.rho is not None:
            raise UserError(
                f"keep {self.keep:g} and rho {self.rho:g} are both given; allowed: one of the two"
            )
        for name in ("anchors", "dense_layers"):
            layers = getattr(self, name)
            if layers is not None:
                object.__setattr__(self, name, check_layers(name.replace("_", "-"), layers))

    @property
    def budget(self) -> tuple[int, float]:
        """(l0, rho) after defaults."""
        if self.keep is not None:
            return self.l0 or 0, self.keep
        return (PAPER_L0 if self.l0 is None else self.l0), (PAPER_RHO if self.rho is None else self.rho)


@dataclasses.dataclass(frozen=True)
class SparsityConfig:
    """Everything that may be sparse in verification; None: that part is dense. At least one part is not.

    Raises:
      UserError: all three are None.
    """

    attention: AttentionSparsity | None = dataclasses.field(default_factory=AttentionSparsity)
    ffn: ChannelSparsity | None = None
    experts: ExpertSparsity | None = None
    provenance: tuple[tuple[str, Any], ...] = ()  # where a file's figures come from

    def __post_init__(self) -> None:
        if all(getattr(self, name) is None for name in PARTS):
            raise UserError(f"nothing is sparse; allowed: one or more of {', '.join(PARTS)}")


PARTS: dict[str, type] = {"attention": AttentionSparsity, "ffn": ChannelSparsity, "experts": ExpertSparsity}


def make_sparsity(parts: Mapping[str, Any], provenance: tuple[tuple[str, Any], ...] = ()) -> SparsityConfig:
    """The parts that are named (`PARTS`), or the paper's attention where none is."""
    named = {name: part for name, part in parts.items() if part is not None}
    if not named:
        return SparsityConfig(provenance=provenance)
    return SparsityConfig(**{"attention": None, **named}, provenance=provenance)


def read_sparsity(path: str | Path) -> SparsityConfig:
    """A sparsity TOML file. Raises UserError for one that cannot be read, or says what is not allowed."""
    label = f"sparsity file {str(path)!r}"
    try:
        document = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{label}: {error.strerror}; allowed: a TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{label} is not valid TOML: {error}") from error
    tables = (*PARTS, "provenance")
    for name, table in document.items():
        if name not in tables:
            raise UserError(f"{label}: unknown key {name!r}; allowed: {', '.join(tables)}")
        if not isinstance(table, Mapping):
            raise UserError(f"{label}: {name} = {table!r}; allowed: a table [{name}]")
    try:
        parts = {name: _part_from(document[name], name) for name in PARTS if name in document}
    except UserError as error:
        raise UserError(f"{label}: {error}") from error
    return make_sparsity(parts, tuple(document.get("provenance", {}).items()))


def _part_from(table: Mapping[str, Any], part: str) -> Any:
    fields = {field.name for field in dataclasses.fields(PARTS[part])}
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise UserError(f"unknown key {key!r} in [{part}]; allowed: {', '.join(sorted(fields))}")
        if name in values:
            raise UserError(f"{key!r} is there twice, with dashes and with underscores")
        values[name] = value
    return PARTS[part](**values)
