"""How long JAX traced, lowered, compiled or loaded programs: kept apart from the time that decoding takes."""

from __future__ import annotations

import time

import jax

_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class _Clock:
    """Length of the union of the intervals that JAX reports: traces nest, and must not count twice."""

    def __init__(self) -> None:
        self.registered = False
        self.closed_seconds = 0.0
        self.intervals: list[tuple[float, float]] = []

    def record(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event not in _EVENTS:
            return
        end = time.perf_counter()
        start = end - duration_secs
        while self.intervals and self.intervals[-1][0] >= start:
            previous = self.intervals.pop()
            self.closed_seconds -= previous[1] - previous[0]
        self.intervals.append((start, end))
        self.closed_seconds += duration_secs


_CLOCK = _Clock()


def compile_seconds() -> float:
    """Seconds of compilation in this process so far, counted from the first call of this function."""
    if not _CLOCK.registered:
        jax.monitoring.register_event_duration_secs_listener(_CLOCK.record)
        _CLOCK.registered = True
    return _CLOCK.closed_seconds
