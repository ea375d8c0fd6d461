r"""Ours against transformers (greedy, prompt lookup) and llama.cpp: same weights, prompts, threads, in turns.

    pip install -e '.[parity,compare]'     # llama-cpp-python is compiled; without it its column is missing
    python scripts/compare.py              # 4 tasks x 2 contexts, 5 rounds
    python scripts/compare.py --tasks quoting --contexts 200 --rounds 2
    python scripts/compare.py --markdown comparison.md

Each round runs every contender once on every prompt; who starts changes from one to the next. Before the
rounds, everybody runs each prompt untimed until nothing compiles any more. Medians and (min..max) over
rounds; a ratio is that of the medians with (min..max) of the ratios within a round. Tables go to standard
error, one JSON object is the last line of standard output.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from comparison.contenders import (
    Contender,
    Run,
    Transformers,
    load_transformers,
    make_llama,
    make_ours,
)
from comparison.machine import Load, available_cores, commit, cpu_name, environment, versions
from comparison.prompts import TASKS, Cell, make_cells
from comparison.results import LOOKUP, PLAIN, Runs, markdown, summarise_cell

import sv_jax


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def draft_length(text: str) -> int | str:
    return text if text == "auto" else int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--contexts", nargs="+", type=int, default=[200, 6000], help="tokens of the prompts")
    parser.add_argument("--new-tokens", type=int, default=64, help="exactly; no text ends before")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--num-speculative-tokens",
        nargs="+",
        type=draft_length,
        default=[7, "auto"],
        metavar="K",
        help="ours, beside plain; a number or auto",
    )
    parser.add_argument("--prompt-lookup-num-tokens", type=int, default=10, help="transformers")
    parser.add_argument("--max-matching-ngram-size", type=int, default=3, help="transformers")
    parser.add_argument("--llama-flash-attention", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.new_tokens - 1, *arguments.contexts) < 1:
        parser.error("--rounds and --contexts must be at least 1, --new-tokens at least 2")
    return arguments


def make_contenders(arguments: argparse.Namespace, model: Any, notes: list[str]) -> list[Contender]:
    threads = available_cores()
    lookup = {
        "prompt_lookup_num_tokens": arguments.prompt_lookup_num_tokens,
        "max_matching_ngram_size": arguments.max_matching_ngram_size,
    }
    reference = load_transformers(model.checkpoint.directory, arguments.dtype, threads)
    notes.append(
        f"transformers: attention {reference.config._attn_implementation}; prompt lookup: "
        + ", ".join(f"{key}={value}" for key, value in lookup.items())
    )
    return [
        Transformers(PLAIN, reference),
        Transformers(LOOKUP, reference, **lookup),
        *make_llama(arguments.model, threads, model.max_model_len, arguments.llama_flash_attention, notes),
        *make_ours(model, arguments.num_speculative_tokens, notes),
    ]


def timed(contender: Contender, cell: Cell, n: int) -> Run:
    gc.collect()
    run = contender.run(cell.token_ids, n)
    if len(run.token_ids) != n:
        raise RuntimeError(f"{contender.name} wrote {len(run.token_ids)} tokens instead of {n}")
    return run


def warm_up(contenders: list[Contender], cells: list[Cell], n: int) -> None:
    for cell in cells:
        for contender in contenders:
            started = time.perf_counter()
            timed(contender, cell, n)
            say(f"warm-up: {cell.name}: {contender.name}, {time.perf_counter() - started:.1f} s")


def run_rounds(contenders: list[Contender], cells: list[Cell], rounds: int, n: int) -> list[Runs]:
    """For each cell what everybody did; an interrupt ends after the last whole round, if there is one."""
    results: list[Runs] = [{contender.name: [] for contender in contenders} for _ in cells]
    done = 0
    try:
        for number in range(rounds):
            for place, cell in enumerate(cells):
                first = (number + place) % len(contenders)
                for contender in contenders[first:] + contenders[:first]:
                    run = timed(contender, cell, n)
                    results[place][contender.name].append(run)
                    say(
                        f"round {number + 1}/{rounds}: {cell.name}: {contender.name}: first token "
                        f"{run.ttft_seconds:.2f} s, then {run.tokens_per_second:.1f} tokens/s"
                    )
            done += 1
    except KeyboardInterrupt:
        if not done:
            raise
        say(f"interrupted; {done} whole rounds count")
    return [{name: runs[:done] for name, runs in of_cell.items()} for of_cell in results]


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    notes: list[str] = []
    model = sv_jax.load_model(arguments.model, dtype=arguments.dtype, progress=False)
    n = arguments.new_tokens
    cells = make_cells(model, arguments.tasks, arguments.contexts, n)
    for cell in cells:
        if len(cell.token_ids) + n > model.max_model_len:
            raise sv_jax.UserError(f"{cell.name}: prompt and output do not fit {model.max_model_len} tokens")
    contenders = make_contenders(arguments, model, notes)
    for note in notes:
        say(note)
    warm_up(contenders, cells, n)
    before = Load.now()
    results = run_rounds(contenders, cells, arguments.rounds, n)
    others = Load.now().others_since(before)
    if others is not None:
        notes.append(f"other processes kept {others:.2f} cores busy during the rounds")
    summaries = []
    for cell, runs in zip(cells, results):
        summary = summarise_cell(cell, runs, contenders, model.top2_gap)
        summaries.append({**summary, "text": model.tokenizer.decode(runs[PLAIN][0].token_ids)})
    machine = {"cpu": cpu_name(), "threads": available_cores(), "cores": os.cpu_count()}
    return {
        "model": model.provenance,
        "commit": commit(),
        "machine": {**machine, "cores_busy_with_others": others},
        "versions": versions(),
        "environment": environment(),
        "settings": {key: value for key, value in vars(arguments).items() if key != "markdown"},
        "rounds": len(results[0][PLAIN]),
        "notes": notes,
        "cells": summaries,
    }


def main() -> None:
    arguments = parse_arguments()
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        sys.exit("transformers and torch are what ours is compared with: pip install -e '.[parity]'")
    try:
        result = compare(arguments)
    except sv_jax.UserError as error:
        sys.exit(f"error: {error}")
    text = markdown(result)
    say("\n" + text)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
