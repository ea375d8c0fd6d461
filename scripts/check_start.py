"""Seconds from the start of Python to the first token of the README's main command, by part.

    python scripts/check_start.py        # run it twice: the second start is what it is about

The calls are those of `python -m sv_jax.generate --mesh 4x2`, which prints several rows only as each ends.
The last line is one JSON object.
"""

from __future__ import annotations

import json
import time

STARTED = time.perf_counter()


def main() -> None:
    from sv_jax.builtin_prompts import BUILTIN_PROMPTS
    from sv_jax.sharding import ensure_devices

    ensure_devices(8)
    imported = time.perf_counter()
    import sv_jax
    from sv_jax.engine.compile_clock import compile_seconds

    model = sv_jax.load_model("smollm2-135m", mesh=(4, 2), lazy=True)
    resolved = time.perf_counter()
    model.load_weights()
    loaded, compiled_before = time.perf_counter(), compile_seconds()
    first: list[tuple[float, float]] = []

    def on_text(row: int, text: str, finish_reason: str | None) -> None:
        if not first:
            first.append((time.perf_counter(), compile_seconds() - compiled_before))

    model.generate(list(BUILTIN_PROMPTS), max_new_tokens=2, on_text=on_text)
    at, compiled = first[0]
    parts = {
        "import_and_devices": imported - STARTED,
        "checkpoint_and_tokenizer": resolved - imported,
        "weights": loaded - resolved,
        "compile_or_load_programs": compiled,
        "prefill": at - loaded - compiled,
        "to_first_token": at - STARTED,
    }
    print(json.dumps({name: round(seconds, 2) for name, seconds in parts.items()}))


if __name__ == "__main__":
    main()
