"""Command line: prompts in, speculatively decoded text and a summary out.

    python -m sv_jax.generate --prompt "Why is the sky blue?" --mesh 4x2

JAX is imported only after options, mesh and prompts are known to be good: mistakes get their answer at once,
and the emulated devices have to be asked for before JAX starts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sv_jax.builtin_prompts import BUILTIN_PROMPTS
from sv_jax.command import exit_with, run_command, say
from sv_jax.config import Cuts, UserError
from sv_jax.interrupts import INTERRUPTED, deferred_interrupts
from sv_jax.option_table import flag
from sv_jax.options import GenerateOptions, parse_options
from sv_jax.plan_only import check_plan, run_plan
from sv_jax.sparsity_options import read_sparsity_options
from sv_jax.summary import jsonable, lossless_lines, provenance_lines, summary_lines
from sv_jax.text_output import live_printer, print_rows

if TYPE_CHECKING:
    from sv_jax.engine import GenerationResult, LanguageModel, LosslessReport, RequestOutput

NOT_LOSSLESS = 1


def load_model(model: str, **options: Any) -> LanguageModel:
    from sv_jax.engine import load_model as load

    return load(model, **options)


def read_prompts(options: GenerateOptions) -> tuple[str, ...]:
    """The prompts of the options, else the built-in ones. Raises UserError for a file without any."""
    if options.prompt_file is not None:
        return _read_prompt_file(options.prompt_file)
    return options.prompt or BUILTIN_PROMPTS


def _read_prompt_file(name: str) -> tuple[str, ...]:
    label = f"{flag('prompt_file')} {name!r}"
    try:
        if name == "-" and sys.stdin.isatty():
            say("reading prompts from standard input, one a line; Ctrl-D ends them")
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{label}: {error.strerror}; allowed: a readable text file, or - ") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{label} is not UTF-8 text (byte {error.start} is {data[error.start]:#x})"
        ) from error
    # Only newlines separate: splitlines() would also cut at U+2028 and form feeds inside of a prompt.
    prompts = tuple(line.removesuffix("\r") for line in text.split("\n") if line.strip())
    if not prompts:
        raise UserError(f"{label} has no prompts; allowed: one prompt a line, of lines that are not blank")
    return prompts


def request_settings(options: GenerateOptions) -> dict[str, Any]:
    """What the engine is asked for, beside the prompts. Raises UserError for a bad --sparsity file."""
    return {
        "max_new_tokens": options.max_new_tokens,
        "min_new_tokens": options.min_new_tokens,
        "num_speculative_tokens": options.num_speculative_tokens,
        "draft_method": options.draft_method,
        "sampling": options.sampling,
        "stop": options.stop,
        "include_stop": options.include_stop,
        "ignore_eos": options.ignore_eos,
        "logprobs": options.logprobs,
        "max_batch_size": options.max_batch_size,
        "sparsity": read_sparsity_options(options),
    }


def prepare(
    options: GenerateOptions, settings: dict[str, Any], mesh: tuple[int, int], prompts: Sequence[str]
) -> tuple[LanguageModel, list[list[int]]]:
    """The model with its weights, and the prompts' token ids. Bad requests are refused before the weights."""
    from sv_jax import sharding

    sharding.ensure_devices(mesh[0] * mesh[1])
    model = load_model(
        options.model,
        mesh=mesh,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        implementation=options.implementation,
        cuts=Cuts(options.kv_shard, options.expert_shard),
        cache_directory=Path(options.cache_dir).expanduser() if options.cache_dir else None,
        notify=say,
        lazy=True,
    )
    say(model.provenance)
    say(f"{model.sharding.describe()}; {model.dtype}, context of {model.max_model_len} tokens")
    encoded = [model.encode_prompt(prompt, chat=options.chat) for prompt in prompts]
    model.check_request(encoded, **settings)
    if (sparsity := settings["sparsity"]) is not None:
        lines = [*model.describe_sparsity(sparsity), *provenance_lines(sparsity, model.checkpoint.sha256)]
        say("\n".join(lines))
    warn_about_idle_devices(mesh, len(prompts))
    model.load_weights()
    return model, encoded


def warn_about_idle_devices(mesh: tuple[int, int], rows: int) -> None:
    data, model = mesh
    if rows < data:
        idle = (data - rows) * model
        noun = "prompt" if rows == 1 else "prompts"
        say(f"{rows} {noun} for a data axis of {data}: {idle} of {data * model} devices are idle")


def decode(
    options: GenerateOptions,
    settings: dict[str, Any],
    model: LanguageModel,
    prompts: Sequence[str],
    encoded: list[list[int]],
) -> GenerationResult:
    """Generates, printing text as the options say; the first Ctrl-C ends it with what there is."""
    printer = live_printer(prompts, sys.stderr if options.json else sys.stdout) if options.stream else None
    with deferred_interrupts() as interrupted:
        result = model.generate(
            encoded,
            **settings,
            on_text=printer.on_text if printer else None,
            should_stop=interrupted,
        )
    if printer:
        printer.finish(result.outputs)
    elif not options.json:
        print_rows(prompts, result.outputs, sys.stdout)
    return result


def compare(model: LanguageModel, result: GenerationResult, encoded: list[list[int]]) -> LosslessReport:
    """Decodes once more, plainly, densely and otherwise as it was asked for, and says how the two differ."""
    with deferred_interrupts() as interrupted:
        report = model.compare_with_plain(result, encoded, should_stop=interrupted)
    say("\n".join(lossless_lines(report)))
    return report


def output_document(output: RequestOutput) -> dict[str, Any]:
    """One row for JSON; "logprobs" only where they were asked for."""
    fields = ("prompt_tokens", "token_ids", "text", "finish_reason")
    document = {name: getattr(output, name) for name in fields}
    if output.logprobs is not None:
        document["logprobs"] = [
            {
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "top": [{"token_id": token, "logprob": logprob} for token, logprob in entry.top],
            }
            for entry in output.logprobs
        ]
    return document


def json_line(result: GenerationResult, report: LosslessReport | None) -> str:
    """One line that every JSON reader takes: ASCII (so no stray line separators), no NaN."""
    document: dict[str, Any] = {
        "outputs": [output_document(output) for output in result.outputs],
        "stats": result.stats.as_dict(),
    }
    if report is not None:
        document["lossless"] = {
            "lossless": report.lossless,
            "identical_rows": report.identical_rows,
            "rows": report.rows,
            "interrupted": report.interrupted,
            "divergences": [dataclasses.asdict(d) for d in report.divergences],
        }
    return json.dumps(jsonable(document), allow_nan=False)


def run(options: GenerateOptions) -> int:
    """One run of the command line. Returns the exit code."""
    check_plan(options)
    if options.plan_only:
        return run_plan(options)
    settings, prompts = request_settings(options), read_prompts(options)
    from sv_jax.sharding import parse_mesh

    model, encoded = prepare(options, settings, parse_mesh(options.mesh), prompts)
    result = decode(options, settings, model, prompts, encoded)
    say("\n".join(summary_lines(result.stats.as_dict(), len(prompts), options.sampling)))
    code, report = 0, None
    if result.interrupted:
        code = INTERRUPTED
    elif options.check_lossless:
        report = compare(model, result, encoded)
        code = INTERRUPTED if report.interrupted else 0 if report.lossless else NOT_LOSSLESS
    if options.json:
        print(json_line(result, report), flush=True)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(lambda: run(parse_options(arguments)))


if __name__ == "__main__":
    exit_with(main)
