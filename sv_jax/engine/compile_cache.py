"""The persistent compilation cache: the second start of a program loads what the first one compiled."""

from __future__ import annotations

import os
from pathlib import Path

import jax

MIN_COMPILE_SECONDS = 0.3  # cheaper programs are compiled faster than they are looked up


def enable_compilation_cache(directory: Path) -> None:
    """Points JAX's persistent cache at `directory`/xla, unless the user has chosen one or switched it off.

    JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE=0 are respected.
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", str(directory / "xla"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
