"""Progress of long reads and writes on stderr: a bar on a terminal, one line anywhere else."""

from __future__ import annotations

import sys

from tqdm import tqdm


def progress_bar(description: str, total: int, unit: str, *, progress: bool) -> tqdm:
    """A bar that vanishes at its end, in bytes (unit "B") or things.

    Where stderr is not a terminal (a log, a pipe) a line says what begins, and no bar is drawn: a log would
    keep every carriage return of it.
    """
    scaled = unit == "B"
    terminal = sys.stderr.isatty()
    if progress and not terminal:
        size = tqdm.format_sizeof(total, "B", 1000) if scaled else f"{total} {unit}s"
        print(f"{description} ({size})", file=sys.stderr, flush=True)
    return tqdm(
        desc=description,
        total=total,
        unit=unit,
        unit_scale=scaled,
        disable=not (progress and terminal),
        leave=False,
    )
