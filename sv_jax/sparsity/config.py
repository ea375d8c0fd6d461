"""What a user may ask of sparse verification: checked numbers, from the command line or a TOML file. No JAX.

[attention]            # configs/sparsity/*.toml
keep = 0.25
block-size = 32
anchors = [0, 4, 8]

[provenance]           # written by `python -m sv_jax.calibrate`, shown at start, else not used
model = "..."
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sv_jax.config import Range, UserError

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
    """Everything that may be sparse in verification."""

    attention: AttentionSparsity = dataclasses.field(default_factory=AttentionSparsity)
    provenance: tuple[tuple[str, Any], ...] = ()  # where a file's figures come from


def check_layers(label: str, layers: Any) -> tuple[int, ...]:
    """Layer numbers, ascending and without repetition. Raises UserError."""
    allowed = "a list of different layer numbers, 0 or more"
    if not isinstance(layers, list | tuple):
        raise UserError(f"{label} {layers!r} is not allowed; allowed: {allowed}")
    for layer in layers:
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
            raise UserError(f"{label} has {layer!r}; allowed: {allowed}")
    if len(set(layers)) != len(layers):
        raise UserError(f"{label} {list(layers)} names a layer twice; allowed: {allowed}")
    return tuple(sorted(layers))


def read_sparsity(path: str | Path) -> SparsityConfig:
    """A sparsity TOML file. Raises UserError for one that cannot be read, or says what is not allowed."""
    label = f"sparsity file {str(path)!r}"
    try:
        document = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{label}: {error.strerror}; allowed: a TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{label} is not valid TOML: {error}") from error
    tables = ("attention", "provenance")
    for name, table in document.items():
        if name not in tables:
            raise UserError(f"{label}: unknown key {name!r}; allowed: {', '.join(tables)}")
        if not isinstance(table, Mapping):
            raise UserError(f"{label}: {name} = {table!r}; allowed: a table [{name}]")
    try:
        attention = _attention_from(document.get("attention", {}))
    except UserError as error:
        raise UserError(f"{label}: {error}") from error
    return SparsityConfig(attention, tuple(document.get("provenance", {}).items()))


def _attention_from(table: Mapping[str, Any]) -> AttentionSparsity:
    fields = {field.name for field in dataclasses.fields(AttentionSparsity)}
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise UserError(f"unknown key {key!r} in [attention]; allowed: {', '.join(sorted(fields))}")
        if name in values:
            raise UserError(f"{key!r} is there twice, with dashes and with underscores")
        values[name] = value
    return AttentionSparsity(**values)
