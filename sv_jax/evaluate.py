"""Command line: what sparse verification changes, measured.

    python -m sv_jax.evaluate drift --kinds copy --contexts 4096 --keep 0.1,0.25

JAX is imported only after the options and the files that they name are known to be good.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sv_jax.command import exit_with, run_command, say
from sv_jax.config import UserError
from sv_jax.drift_options import DriftGrid, DriftOptions, parse_drift_options
from sv_jax.evaluation import plots
from sv_jax.evaluation.store import Store
from sv_jax.interrupts import INTERRUPTED
from sv_jax.summary import jsonable

if TYPE_CHECKING:
    from sv_jax.engine import LanguageModel
    from sv_jax.evaluation.drift import DriftSetting
    from sv_jax.evaluation.drift_report import DriftReport
    from sv_jax.evaluation.drift_run import DriftRun
    from sv_jax.evaluation.texts import Case

RESULTS = "results.jsonl"


def load_model(model: str, **options: Any) -> LanguageModel:
    from sv_jax.engine import load_model as load

    return load(model, **options)


def cache_directory(options: DriftOptions) -> Path | None:
    return Path(options.cache_dir).expanduser() if options.cache_dir else None


def prepare(options: DriftOptions, grid: DriftGrid, mesh: tuple[int, int]) -> LanguageModel:
    """The model without its weights. Raises UserError for what it cannot do."""
    from sv_jax import sharding

    sharding.ensure_devices(mesh[0] * mesh[1])
    model = load_model(
        options.model,
        mesh=mesh,
        dtype=options.dtype,
        cache_directory=cache_directory(options),
        notify=say,
        lazy=True,
    )
    for context in grid.contexts:
        if context > model.max_model_len:
            raise UserError(
                f"--contexts has {context}; allowed for {options.model}: at most {model.max_model_len}"
            )
    say(model.provenance)
    say(f"{model.sharding.describe()}; {model.dtype}")
    return model


def make_settings(grid: DriftGrid, model: LanguageModel) -> list[DriftSetting]:
    """Every attention with every selector. Raises UserError for layers that the model does not have."""
    from sv_jax.evaluation.drift import DriftSetting, plan_of

    settings = [DriftSetting(s, attention) for attention in grid.attentions for s in grid.selectors]
    for setting in settings:
        plan_of(setting, model)
    return settings


def collect_cases(options: DriftOptions, grid: DriftGrid, model: LanguageModel) -> list[list[Case]]:
    """Cases that run side by side: of one kind and context. Raises UserError where there are none."""
    from sv_jax.evaluation.texts import make_cases, user_cases

    groups: list[list[Case]] = []
    for context in grid.contexts:
        for kind in grid.kinds:
            cases = make_cases(
                kind,
                model.tokenizer,
                context=context,
                limit=options.limit,
                seed=options.seed,
                cache_directory=cache_directory(options),
            )
            groups.append(cases)
        own = user_cases(grid.texts, model.tokenizer, context=context, limit=options.limit)
        groups += [[case for case in own if case.kind == kind] for kind in dict.fromkeys(c.kind for c in own)]
    refuse_short_texts(options, grid, groups)
    return groups


def refuse_short_texts(options: DriftOptions, grid: DriftGrid, groups: Sequence[Sequence[Case]]) -> None:
    """Raises UserError for the user's first text that fills none of the contexts."""
    used = {(case.kind, case.document) for cases in groups for case in cases}
    counts = {kind: 0 for kind, _ in used}
    for text in grid.texts:
        if (text.kind, text.name) in used:
            counts[text.kind] += 1
        elif counts.get(text.kind, 0) < options.limit:  # not left out for their number
            raise UserError(
                f"--texts {options.texts!r}, line {text.line}: the text fills none of the contexts "
                f"{', '.join(map(str, grid.contexts))}; allowed: longer texts, or a shorter --contexts"
            )


def measure_all(
    run: DriftRun, groups: Sequence[Sequence[Case]], settings: Sequence[DriftSetting], options: DriftOptions
) -> None:
    """Measures what the store lacks, a progress bar for each kind and context."""
    from sv_jax.checkpoints.progress import progress_bar
    from sv_jax.evaluation.free_running import runnable

    missing = sum(run.missing(cases, settings) for cases in groups)
    total = sum(len(cases) for cases in groups) * len(settings)
    say(f"{total} results, {total - missing} of them from {run.store.path}")
    if missing:
        run.model.load_weights()
    for cases in groups:
        label = f"{cases[0].kind}, {len(cases[0].token_ids)} tokens"
        with progress_bar(label, run.missing(cases, settings), "result", progress=True) as bar:
            run.measure_missing(cases, settings, on_results=bar.update)
        if options.free_running and cases[0].kind != "needle":
            free = runnable(settings)
            with progress_bar(
                f"{label}, running freely", len(cases) * len(free), "text", progress=True
            ) as bar:
                run.run_freely_missing(cases, free, options.free_running, on_results=bar.update)


def write_report(report: DriftReport, options: DriftOptions) -> None:
    """Tables and the JSON document into the output directory; what a person reads to where it belongs."""
    folder = Path(options.output).expanduser()
    document = json.dumps(jsonable(report.document()), allow_nan=False)
    try:
        (folder / "drift.json").write_text(document + "\n", encoding="utf-8")
        (folder / "drift.md").write_text("\n".join(report.markdown()) + "\n", encoding="utf-8")
        written = ["drift.md", "drift.json"]
        if options.plots and plots.can_plot():
            written += [path.name for path in plots.write_plots(report.rows, folder, title=report.title)]
    except OSError as error:
        raise UserError(f"--output {options.output!r}: {error.strerror}") from error
    lines = "\n".join(report.terminal())
    if options.json:
        say(lines)
    else:
        print(lines, flush=True)
    say(f"in {folder}: {', '.join(written)}")
    if options.plots and not plots.can_plot():
        say(plots.MISSING)
    if options.json:
        print(document, flush=True)


def run_drift(options: DriftOptions, grid: DriftGrid) -> int:
    """One run of the drift meter. Returns the exit code."""
    store = Store(Path(options.output).expanduser() / RESULTS)
    from sv_jax.sharding import parse_mesh

    mesh = parse_mesh(options.mesh)
    model = prepare(options, grid, mesh)
    settings = make_settings(grid, model)
    groups = collect_cases(options, grid, model)

    from sv_jax.evaluation.drift_report import make_report
    from sv_jax.evaluation.drift_run import DriftRun

    rows = -(-options.batch_size // mesh[0]) * mesh[0]
    run = DriftRun(model, store, options.num_speculative_tokens, options.seed, rows)
    interrupted = False
    try:
        measure_all(run, groups, settings, options)
    except KeyboardInterrupt:
        interrupted = True
    report = make_report(run, groups, settings, free_tokens=options.free_running)
    if report.rows:
        write_report(report, options)
    if interrupted:
        say(
            f"interrupted: {report.progress} results are in {store.path}; the same command goes on from there"
        )
    return INTERRUPTED if interrupted else 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(lambda: run_drift(*parse_drift_options(arguments)))


if __name__ == "__main__":
    exit_with(main)
