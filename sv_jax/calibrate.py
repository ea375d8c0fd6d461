"""Command line: finds what verification may leave out, and writes a sparsity file.

    python -m sv_jax.calibrate --keep 0.25 --output configs/sparsity/mine.toml
    python -m sv_jax.calibrate --part ffn --density 0.7 --output ffn.toml
    python -m sv_jax.generate --verify sparse --sparsity configs/sparsity/mine.toml --prompt-file long.txt

JAX is imported only after options, output and texts are known to be good.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sv_jax
from sv_jax.calibrate_options import CalibrateOptions, parse_options
from sv_jax.command import exit_with, run_command, say
from sv_jax.config import UserError
from sv_jax.evaluation.store import Store
from sv_jax.evaluation.user_texts import UserText, read_texts
from sv_jax.interrupts import INTERRUPTED, deferred_interrupts
from sv_jax.option_table import flag
from sv_jax.sparsity.config import PARTS, SparsityConfig, make_sparsity, read_sparsity
from sv_jax.sparsity.ffn_config import ChannelSparsity, ExpertSparsity
from sv_jax.sparsity_file import check_target, write_sparsity

if TYPE_CHECKING:
    from sv_jax.engine import LanguageModel
    from sv_jax.evaluation.calibration_run import Calibration, CalibrationSettings
    from sv_jax.evaluation.texts import Case
    from sv_jax.evaluation.weight_calibration import Activity

MEASURED = 32  # tokens of each text whose prediction is compared


def partial_path(output: Path) -> Path:
    """Where measurements are kept until the file is there."""
    return output.with_name(f"{output.name}.partial.jsonl")


def load_model(model: str, **options: Any) -> LanguageModel:
    from sv_jax.engine import load_model as load

    return load(model, **options)


def open_model(options: CalibrateOptions) -> LanguageModel:
    """The model without its weights. Raises UserError for a context that it does not have."""
    from sv_jax import sharding

    mesh = sharding.parse_mesh(options.mesh)
    sharding.ensure_devices(mesh[0] * mesh[1])
    model = load_model(
        options.model,
        mesh=mesh,
        dtype=options.dtype,
        cache_directory=Path(options.cache_dir).expanduser() if options.cache_dir else None,
        notify=say,
        lazy=True,
    )
    say(model.provenance)
    if options.context > model.max_model_len:
        raise UserError(
            f"{flag('context')} {options.context} is not allowed; allowed for this model: up to "
            f"{model.max_model_len}"
        )
    return model


def prepare(
    options: CalibrateOptions, texts: Sequence[UserText] | None
) -> tuple[LanguageModel, CalibrationSettings, list[Case]]:
    """The model, what is to be done, and the texts. Mistakes are told before weights are read.

    texts: the user's; None: the built-in ones.
    """
    from sv_jax.evaluation.calibration_run import (
        CalibrationSettings,
        check_budget,
        check_layers,
        layer_windows,
    )

    model = open_model(options)
    assert options.tolerance is not None and options.max_dense_layers is not None
    settings = CalibrationSettings(
        attention=options.attention,
        method=options.method,
        num_speculative_tokens=options.num_speculative_tokens,
        reach=options.reach,
        max_anchors=options.max_anchors,
        tolerance=options.tolerance,
        max_dense_layers=options.max_dense_layers,
        dense_gain=options.dense_gain,
        batch_size=options.batch_size,
    )
    check_layers(settings, layer_windows(model))
    cases = make_texts(options, texts, model, "copy")
    check_budget(settings, cases[0])
    positions = sum(case.measured for case in cases)
    noun = "text" if len(cases) == 1 else "texts"
    say(f"{len(cases)} {noun} of {len(cases[0].token_ids)} tokens, {positions} positions compared")
    model.load_weights()
    return model, settings, cases


def make_texts(
    options: CalibrateOptions, texts: Sequence[UserText] | None, model: LanguageModel, kind: str
) -> list[Case]:
    """Texts of a kind, of the part of the documents that no evaluation uses; or the user's."""
    from sv_jax.evaluation.texts import make_cases, user_cases

    if texts is None:
        return make_cases(
            kind,
            model.tokenizer,
            context=options.context,
            split="calibration",
            limit=options.limit,
            seed=options.seed,
            measured=MEASURED,
            cache_directory=Path(options.cache_dir).expanduser() if options.cache_dir else None,
        )
    cases = user_cases(texts, model.tokenizer, context=options.context, measured=MEASURED)
    if not cases:
        raise UserError(
            f"{flag('texts')} {options.texts!r}: no text fills a context of {options.context} tokens; "
            f"allowed: longer texts, or a smaller {flag('context')}"
        )
    return cases[: options.limit]


def write(
    output: Path,
    options: CalibrateOptions,
    model: LanguageModel,
    settings: CalibrationSettings,
    cases: Sequence[Case],
    calibration: Calibration,
) -> None:
    """Puts the sparsity file in place. Raises UserError where that is not possible any more."""
    from sv_jax.evaluation.calibration_report import layer_table, provenance

    use = f"python -m sv_jax.generate --model {shlex.quote(options.model)} --verify sparse --sparsity "
    write_sparsity(
        output,
        beside(
            options,
            attention=dataclasses.replace(
                settings.attention,
                anchors=calibration.chosen.anchors,
                dense_layers=tuple(sorted(calibration.dense_layers)),
            ),
        ),
        provenance(calibration, settings, model, cases, context=options.context, seed=options.seed)
        | {"sv_jax": sv_jax.__version__},
        heading=(
            "Dense layers read everything. Anchors choose the blocks that are read; every other layer reads",
            "what the last anchor before it chose.",
            "",
            f"    {use}{shlex.quote(options.output)}",
            "",
            f"Written by: {options.command()}",
        ),
        remarks=layer_table(calibration),
        force=options.force,
    )


def beside(options: CalibrateOptions, **part: Any) -> SparsityConfig:
    """The parts of the --sparsity file, with `part` in place of its own. Raises UserError for a bad file."""
    config = None if options.sparsity is None else read_sparsity(options.sparsity)
    parts = {name: getattr(config, name, None) for name in PARTS}
    return make_sparsity(parts | part)


def run(options: CalibrateOptions) -> int:
    """One run of the command line. Returns the exit code."""
    output = Path(options.output).expanduser()
    check_target(output, force=options.force)
    beside(options)
    texts = None if options.texts is None else read_texts(options.texts)
    if options.part != "attention":
        return calibrate_weights(output, options, texts)
    return calibrate_attention(output, options, texts)


def calibrate_weights(output: Path, options: CalibrateOptions, texts: Sequence[UserText] | None) -> int:
    """Thresholds of feed-forward networks, or betas of experts. A few minutes: nothing is kept on the way."""
    from sv_jax.checkpoints.progress import progress_bar
    from sv_jax.evaluation.weight_calibration import make_chunks, watch

    model = open_model(options)
    if options.part == "experts" and model.target.config.moe is None:
        raise UserError(f"--part experts: {options.model} has no experts; allowed: attention, ffn")
    cases = make_texts(options, texts, model, "ordinary")
    model.load_weights()
    chunks = make_chunks(cases)
    total = sum(map(len, chunks))
    try:
        with progress_bar("watching", total, "token", progress=True) as bar:
            activity = watch(model, chunks, on_chunk=bar.update)
    except KeyboardInterrupt:
        say("interrupted: nothing was written")
        return INTERRUPTED
    part, figures = make_part(activity, options)
    provenance = {
        "model": options.model,
        "model_sha256": model.checkpoint.sha256,
        "dtype": model.dtype,
        "context": options.context,
        "seed": options.seed,
        "tokens": total,
        **figures,
        "documents": sorted({case.document for case in cases}),
        "sv_jax": sv_jax.__version__,
    }
    write_sparsity(
        output,
        beside(options, **{options.part: part}),
        provenance,
        heading=(f"Written by: {options.command()}",),
        force=options.force,
    )
    print("\n".join(f"{name}: {value}" for name, value in figures.items()))
    print(f"written: {output}")
    return 0


def make_part(
    activity: Activity, options: CalibrateOptions
) -> tuple[ChannelSparsity | ExpertSparsity, dict[str, Any]]:
    """What the options ask for, and the figures that it comes from.

    Raises:
      UserError: a skip rate, or a number of experts, that the model cannot have.
    """
    from sv_jax.evaluation.weight_calibration import MEASURES, find_betas, find_thresholds

    if options.part == "ffn":
        histograms = activity.histograms[list(MEASURES).index(options.ffn_rule)]
        thresholds = find_thresholds(histograms, options.density, one=options.one_threshold)
        return ChannelSparsity(options.ffn_rule, tuple(thresholds)), {"density": options.density}
    assert activity.weights is not None
    k = activity.weights.shape[-1]
    if options.max_skipped >= k:
        raise UserError(f"max-skipped {options.max_skipped}; allowed for this model: up to {k - 1}")
    betas, quantile, rate = find_betas(
        activity, max_skipped=options.max_skipped, reading=options.skip_reading, rate=options.skip_rate
    )
    part = ExpertSparsity(
        max_skipped=options.max_skipped,
        betas=tuple(tuple(round(beta, 6) for beta in row) for row in betas),
        reading=options.skip_reading,
    )
    return part, {"beta_quantile": round(quantile, 4), "skipped_share": round(rate, 4)}


def calibrate_attention(output: Path, options: CalibrateOptions, texts: Sequence[UserText] | None) -> int:
    """Anchors and dense layers. Measurements are kept: the same command goes on with them."""
    from sv_jax.evaluation.calibration_report import report
    from sv_jax.evaluation.calibration_run import calibrate

    model, settings, cases = prepare(options, texts)
    store = Store(partial_path(output))
    if len(store):
        say(f"steps measured before: {len(store)}, in {store.path}; those that fit are used")
    with deferred_interrupts() as interrupted:
        calibration = calibrate(model, cases, settings, store, should_stop=interrupted)
    if calibration is None:
        if len(store):
            say(f"measured steps: {len(store)}, in {store.path}; the same command goes on from there")
        else:
            store.path.unlink()
        return INTERRUPTED
    write(output, options, model, settings, cases, calibration)
    store.path.unlink()
    print("\n".join(report(calibration, settings)))
    print(f"written: {output}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(lambda: run(parse_options(arguments)))


if __name__ == "__main__":
    exit_with(main)
