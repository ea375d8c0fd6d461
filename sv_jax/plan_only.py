"""`python -m sv_jax.generate --plan-only`: what a model would need on chips that are not here.

It reads a config and nothing else: no weights, no network, no accelerator.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from sv_jax.config import Cuts, UserError
from sv_jax.option_table import flag
from sv_jax.options import OPTIONS, GenerateOptions
from sv_jax.sparsity.config import SparsityConfig
from sv_jax.sparsity_options import read_sparsity_options
from sv_jax.summary import jsonable

if TYPE_CHECKING:  # it imports JAX
    from sv_jax.ahead_of_time.programs import CompiledSlice
    from sv_jax.planning.report import Answer


def check_plan(options: GenerateOptions) -> None:
    """Raises UserError for --plan-only without its chips, and for options that nothing else reads."""
    if options.plan_only and options.platform is None:
        raise UserError(f"--plan-only needs --platform; allowed: {OPTIONS['platform'].allowed}")
    for name in ("platform", "batch_size"):
        if not options.plan_only and getattr(options, name) is not None:
            raise UserError(f"{flag(name)} says what to plan for; allowed: only with --plan-only")


def run_plan(options: GenerateOptions) -> int:
    """Prints the plan. Raises UserError, after it, where the model does not fit."""
    sparsity = read_sparsity_options(options)
    import jax

    # An accelerator that is here has no part in this, and would be taken from whoever uses it.
    jax.config.update("jax_platforms", "cpu")
    from sv_jax.planning.footprint import shapes_that_fit, spreading_experts_fits
    from sv_jax.planning.report import document, report_lines, verdict

    answer = make_answer(options, sparsity)
    fits = answer.footprint.fits
    fitting = [] if fits else shapes_that_fit(answer.deployment)
    spread = not fits and spreading_experts_fits(answer.deployment)
    if not options.json:
        print("\n".join(report_lines(answer)), flush=True)
    check, why_not = None, "not run, for it does not fit"
    if fits:
        check, why_not = compile_check(options, answer, sparsity)
    if options.json:
        said = None if check is None else dataclasses.asdict(check)
        print(json.dumps(jsonable(document(answer, fitting, said)), allow_nan=False), flush=True)
    else:
        print(check_line(check, why_not), flush=True)
    if not fits:
        raise UserError(f"{verdict(answer)}; allowed: {_what_would_fit(answer, fitting, spread)}")
    return 0


def compile_check(
    options: GenerateOptions, answer: Answer, sparsity: SparsityConfig | None
) -> tuple[CompiledSlice | None, str]:
    """What the platform's compiler says of the decoding loop's slice; or None, and why.

    Raises UserError for an implementation that does not take the shapes, or where the compiler refuses.
    """
    from sv_jax.ahead_of_time.programs import SliceProgram, compile_slice
    from sv_jax.ahead_of_time.targets import CompilerMissing

    if not options.compile_check:
        return None, f"not run, as {flag('no_compile_check')} says"
    deployment = answer.deployment
    program = SliceProgram(
        config=deployment.config,
        platform=deployment.platform,
        mesh=deployment.mesh,
        batch=deployment.padded_batch,
        capacity=deployment.capacity,
        num_speculative_tokens=deployment.num_speculative_tokens,
        sparsity=sparsity,
        implementation=options.implementation,
        cuts=deployment.cuts,
        dtype=deployment.dtype,
    )
    try:
        return compile_slice(program), ""
    except CompilerMissing as missing:
        return None, f"not run: {missing}"
    except NotImplementedError as error:
        raise UserError(str(error)) from error
    except RuntimeError as error:  # JAX's, of the compiler
        raise UserError(f"the compiler of {deployment.platform} refuses: {first_line(error)}") from error


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def check_line(check: CompiledSlice | None, why_not: str) -> str:
    """What the compiler says of the slice. why_not: why there is no check."""
    if check is None:
        return f"compile check: {why_not}"
    copies = f", {len(check.cache_copies)} copies of a cache" if check.cache_copies else ""
    moved = ", ".join(f"{count} {kind}" for kind, count in sorted(check.collectives.items()))
    return (
        f"compile check: {check.topology}, attention {check.implementation}, in {check.seconds:.0f} s: "
        f"{_gib(check.argument_bytes)} of arguments and {_gib(check.temporary_bytes)} of temporaries a chip"
        f"{copies}; in the loop {moved or 'no collectives'}"
    )


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def make_answer(options: GenerateOptions, sparsity: SparsityConfig | None) -> Answer:
    """The plan of a run with these options.

    Args:
      sparsity: None: verification is dense; floors of sparse steps are then those of the paper's budget.

    Raises:
      UserError: there is no such config, or the model does not go with the mesh, the context or `sparsity`.
    """
    from sv_jax.checkpoints.config_alone import find_config
    from sv_jax.planning.deployment import Deployment
    from sv_jax.planning.floors import Verification, make_step
    from sv_jax.planning.footprint import make_footprint, weights_by_kind
    from sv_jax.planning.hardware import smallest_topology
    from sv_jax.planning.report import Answer
    from sv_jax.sharding import parse_mesh
    from sv_jax.sparsity.plan import SparsityPlan, make_plan

    assert options.platform is not None
    cache = Path(options.cache_dir) if options.cache_dir else None
    config, origin = find_config(options.model, cache_directory=cache)
    deployment = Deployment(
        name=options.model,
        config=config,
        platform=options.platform,
        mesh=parse_mesh(options.mesh),
        dtype=options.dtype or "bfloat16",
        max_model_len=options.max_model_len or config.max_position_embeddings,
        batch_size=options.batch_size or options.max_batch_size,
        num_speculative_tokens=drafted_tokens(options),
        sparsity=None if sparsity is None else make_plan(sparsity, config),
        cuts=Cuts(options.kv_shard, options.expert_shard),
    )
    smallest_topology(options.platform, deployment.chips)
    plan = deployment.sparsity or make_plan(SparsityConfig(), config)
    widths = sorted({deployment.width, 1}, reverse=True)
    kinds: tuple[tuple[Verification, SparsityPlan | None], ...] = (("dense", None), ("sparse", plan))
    return Answer(
        deployment=deployment,
        origin=origin,
        weights=weights_by_kind(deployment),
        footprint=make_footprint(deployment),
        plan=plan,
        steps=tuple(make_step(deployment, kind, width, chosen) for kind, chosen in kinds for width in widths),
    )


def drafted_tokens(options: GenerateOptions) -> int:
    """The most that a step drafts."""
    from sv_jax.engine.speculation_length import SIZES

    if options.draft_method == "none":
        return 0
    k = options.num_speculative_tokens
    return max(SIZES) if isinstance(k, str) else k


def _what_would_fit(answer: Answer, fitting: list[tuple[int, int]], spread: bool) -> str:
    deployment = answer.deployment
    less = f"less of {flag('max_model_len')} ({deployment.max_model_len}) or {flag('batch_size')} "
    less += f"({deployment.batch_size}), or more chips"
    if spread:
        less = f"{flag('expert_shard')} all, with which it fits, {less}"
    if deployment.chips == 1:
        return less
    if not fitting:
        return f"{less}; no other mesh of {deployment.chips} chips fits"
    shapes = " or ".join(f"{data}x{model}" for data, model in fitting)
    return f"{flag('mesh')} {shapes}, on which it fits, {less}"
