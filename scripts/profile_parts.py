"""Where the time of a prefill chunk, a plain step and a verify step goes, by part of the model.

    python scripts/profile_parts.py                 # smollm2-135m, 6,000 tokens of context
    python scripts/profile_parts.py --length 200

Runs each program under JAX's profiler, and adds up the time of its operations by the named scope that they
come from. Operations may run at the same time, so that parts can sum to more than the program's own time,
which is measured without the profiler and stands beside them. Floors are bench_verify.py's: FLOPs over the
machine's matrix rate, bytes of weights and K/V over its bandwidth, both measured in the same run. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bench_verify import filled_state, floor_ms, make_wrong_drafter, measure_machine

import sv_jax
from sv_jax.drafts.none import NoDraft
from sv_jax.speculation import decode_slice, prefill_chunk

# The innermost of these scopes names the part.
SCOPES = ("propose", "cache_attention", "step_attention", "attention", "ffn", "head", "accept", "commit")


def part_of(op_name: str) -> str:
    words = op_name.split("/")
    return next((word for word in reversed(words) if word in SCOPES), "other")


def parts_of_instructions(hlo: str) -> dict[str, str]:
    """Part of every instruction of a compiled module.

    XLA drops the metadata of many products: those belong to the part that uses their result, or, where their
    computation is called, to its first instruction that has a part.
    """
    part: dict[str, str] = {}
    first: dict[str, str] = {}  # computation -> part of its first instruction that has one
    calls: dict[str, str] = {}
    uses: dict[str, list[str]] = {}  # instruction -> its users
    computation = ""
    for line in hlo.splitlines():
        if line and not line.startswith(" ") and "{" in line:
            computation = re.split(r"[ (]", line.removeprefix("ENTRY ").lstrip("%"), maxsplit=1)[0]
        defined = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)", line)
        if not defined:
            continue
        name, rest = defined.groups()
        for operand in re.findall(r"%([\w.\-]+)", rest.split("metadata=")[0]):
            uses.setdefault(operand, []).append(name)
        if scope := re.search(r'op_name="([^"]*)"', rest):
            part[name] = part_of(scope[1])
            first.setdefault(computation, part[name])
        elif called := re.search(r"calls=%?([\w.\-]+)", rest):
            calls[name] = called[1]
    part |= {name: first[called] for name, called in calls.items() if called in first}
    for _ in range(4):  # through a few steps without metadata
        for name, users in uses.items():
            known = next((part[user] for user in users if user in part), None)
            if known is not None:
                part.setdefault(name, known)
    return part


def profile(run: Callable[[], None], hlo: str) -> dict[str, float]:
    """Milliseconds of one run by part."""
    part = parts_of_instructions(hlo)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        file = next(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(file))
    total: collections.Counter[str] = collections.Counter()
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                # Loops and branches contain what is counted on its own.
                if event.name in part and not event.name.startswith(("while", "conditional", "call")):
                    total[part[event.name]] += event.duration_ns / 1e6
    return {name: round(ms, 1) for name, ms in total.most_common()}


def measure(run: Callable[[], None], hlo: str, rounds: int) -> dict[str, Any]:
    run()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    return {"ms": round(statistics.median(times), 1), "parts_ms": profile(run, hlo)}


class Program:
    """A program on a state that it takes and gives back; lengths are put back before each run."""

    def __init__(self, function: Any, model: Any, state: Any, *extra: Any, drafter: Any = None) -> None:
        self.function, self.model, self.state, self.extra = function, model, state, extra
        self.drafter = () if drafter is None else (drafter,)
        self.lengths = jax.device_get(state.lengths)

    def arguments(self) -> tuple[Any, ...]:
        state = dataclasses.replace(self.state, lengths=jnp.array(self.lengths))
        return (self.model.target, self.model.params, *self.drafter, state, *self.extra)

    def hlo(self) -> str:
        return self.function.lower(*self.arguments()).compile().as_text()

    def run(self) -> None:
        self.state = self.function(*self.arguments())
        jax.block_until_ready(self.state.lengths)


def programs(model: Any, length: int, k: int) -> dict[str, tuple[Program, int]]:
    """name -> (program, tokens that it computes)."""
    limit, one = model.max_model_len, jnp.int32(1)
    chunk = 256
    start = max(0, length - chunk)
    prefilling = filled_state(model, start, 1, limit, chunk)
    prefilling = dataclasses.replace(prefilling, prompt_lengths=jnp.full((1,), length, jnp.int32))
    tokens = jnp.zeros((1, chunk), jnp.int32)
    plain, wide = filled_state(model, length, 1, limit, 1), filled_state(model, length, 1, limit, k + 1)
    return {
        "prefill chunk": (Program(prefill_chunk, model, prefilling, tokens), chunk),
        "plain step": (Program(decode_slice, model, plain, one, drafter=NoDraft()), 1),
        "verify step": (Program(decode_slice, model, wide, one, drafter=make_wrong_drafter(k)), k + 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--length", type=int, default=6000, help="committed tokens")
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    machine = measure_machine()
    model = sv_jax.load_model(arguments.model, dtype=arguments.dtype, progress=False)
    report: dict[str, Any] = {"model": arguments.model, "length": arguments.length, "machine": machine}
    for name, (program, tokens) in programs(
        model, arguments.length, arguments.num_speculative_tokens
    ).items():
        result = measure(program.run, program.hlo(), arguments.rounds)
        floors = floor_ms(model, machine, arguments.length, 1, tokens)
        report[name] = {**result, **{key: round(value, 1) for key, value in floors.items()}}
        print(name, report[name], file=sys.stderr, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
