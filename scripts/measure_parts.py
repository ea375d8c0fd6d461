"""What it changes to leave out experts, or channels of feed-forward networks, beside controls at equal reads.

    python scripts/measure_parts.py experts --model smollm2-135m-moe    # SMoE, shortlist, smaller k, random
    python scripts/measure_parts.py ffn --model smollm2-135m            # both rules, budget, controls
    python scripts/measure_parts.py files --model smollm2-135m-moe --files attention.toml experts.toml

Texts are the first tokens of documents that calibrated nothing, or with --kind copy passages that such a
document has further up; thresholds and betas come from documents of the calibration part. Results are kept
in --output as they come: the same command goes on after an interruption. All that is compared is lossy. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from comparison.machine import available_cores, commit, cpu_name, versions

import sv_jax
from sv_jax.checkpoints.progress import progress_bar
from sv_jax.engine.language_model import LanguageModel
from sv_jax.evaluation.part_run import FreeText, PartRow, PartRun, acceptance, part_row, part_table
from sv_jax.evaluation.part_steps import Control, PartSetting
from sv_jax.evaluation.report import as_document
from sv_jax.evaluation.store import Store
from sv_jax.evaluation.tables import markdown
from sv_jax.evaluation.texts import make_cases
from sv_jax.evaluation.weight_calibration import (
    MEASURES,
    Activity,
    find_betas,
    find_thresholds,
    make_chunks,
    watch,
)
from sv_jax.sparsity.config import SparsityConfig, read_sparsity
from sv_jax.sparsity.ffn_config import ChannelSparsity, ExpertSparsity
from sv_jax.summary import jsonable


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["experts", "ffn", "files"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", default="measured-parts", help="directory of the results")
    parser.add_argument(
        "--files", nargs="+", default=[], metavar="F.toml", help="what the part files compares"
    )
    parser.add_argument("--kind", default="ordinary", choices=["ordinary", "copy"], help="of texts")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--context", type=int, default=640, help="tokens of a text")
    parser.add_argument("--measured", type=int, default=128, help="the last of them, which are verified")
    parser.add_argument("--calibration-documents", type=int, default=8)
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=0, help="also generate so many behind each text")
    parser.add_argument(
        "--generated", nargs="+", default=[""], metavar="NAME", help="settings that do, by how names begin"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random controls")
    return parser.parse_args()


def file_settings(names: Sequence[str]) -> list[PartSetting]:
    return [PartSetting(Path(name).stem, read_sparsity(name)) for name in names]


def channel_settings(activity: Activity) -> list[PartSetting]:
    """Both rules and the budget, where 30, 50 and 70 % are left out."""
    settings = []
    for dropped in (0.3, 0.5, 0.7):
        name = f"{100 * dropped:.0f} % left out"
        for index, rule in enumerate(MEASURES):
            for one in (False, True):
                thresholds = find_thresholds(activity.histograms[index], 1 - dropped, one=one)
                ffn = ChannelSparsity(rule, tuple(thresholds))
                label = f"{rule}{', one threshold' if one else ''}, {name}"
                settings.append(PartSetting(label, SparsityConfig(None, ffn)))
        budget = SparsityConfig(None, ChannelSparsity("shared", keep=1 - dropped))
        for control in get_args(Control):
            label = f"shared, {control}" if control else "shared"
            settings.append(PartSetting(f"{label}, {name}", budget, control))
    return settings


def setting(name: str, control: str = "", **experts: Any) -> PartSetting:
    return PartSetting(name, SparsityConfig(None, None, ExpertSparsity(**experts)), control)  # type: ignore[arg-type]


def expert_settings(activity: Activity, k: int, renormalise: bool) -> list[PartSetting]:
    """A smaller k, and the paper's skipping with m of 8 scaled to k."""
    fixed = {"renormalise": renormalise}
    settings = [
        setting(f"k = {smaller}", experts_per_token=smaller, **fixed)
        for smaller in dict.fromkeys(round(k * share) for share in (7 / 8, 6 / 8, 5 / 8, 4 / 8, 2 / 8))
    ]
    for m in (2, 3, 4):
        scaled = max(1, round(m * k / 8))
        for reading in ("first", "largest"):
            betas, _, _ = find_betas(activity, max_skipped=scaled, reading=reading, rate=None)
            rules = {"max_skipped": scaled, "betas": betas, "reading": reading}
            settings.append(setting(f"skip up to {scaled}, {reading}", **rules, **fixed))
    return settings


def shortlist_settings(
    rows: Sequence[PartRow], layers: int, num_experts: int, renormalise: bool
) -> list[PartSetting]:
    """A list that reads what each smaller k reads, by votes, re-picked, and drawn."""
    fixed = {"renormalise": renormalise}
    settings = []
    for row in rows:
        if row.setting.startswith("k = ") and row.experts is not None:
            size = min(num_experts, max(1, round(row.experts / layers)))
            settings += [
                setting(f"list of {size}, dropped outside", shortlist=size, **fixed),
                setting(f"list of {size}, re-picked", shortlist=size, outside="repick", **fixed),
                setting(f"list of {size}, random", "random", shortlist=size, **fixed),
            ]
    return list({s.name: s for s in settings}.values())


def watch_calibration(model: LanguageModel, documents: int) -> Activity:
    cases = make_cases("ordinary", model.tokenizer, context=2048, limit=documents, split="calibration")
    return watch(model, make_chunks(cases))


def measure(run: PartRun, cases: Sequence[Any], settings: Sequence[PartSetting]) -> list[PartRow]:
    missing = sum(run.measured(case, s) is None for case in cases for s in settings)
    with progress_bar("measuring", missing, "result", progress=True) as bar:
        run.measure_missing(cases, settings, on_result=bar.update)
    found = [[run.measured(case, s) for case in cases] for s in settings]
    return [part_row([m for m in group if m is not None]) for group in found]


def generate(
    run: PartRun, cases: Sequence[Any], settings: Sequence[PartSetting], names: Sequence[str], tokens: int
) -> dict[str, list[FreeText]]:
    """Texts by setting, "dense" among them; controls know what no run can know."""
    if not tokens:
        return {}
    wanted = [None, *(s for s in settings if not s.control and s.name.startswith(tuple(names)))]
    texts: dict[str, list[FreeText]] = {}
    with progress_bar("generating", len(wanted) * len(cases), "text", progress=True) as bar:
        for case in cases:
            for each in wanted:
                text = run.generated(case, each, tokens)
                texts.setdefault(text.setting, []).append(text)
                bar.update(1)
    return texts


def main() -> None:
    arguments = parse_arguments()
    if (arguments.part == "files") != bool(arguments.files):
        sys.exit("--files names what the part files compares, and nothing else does")
    settings = file_settings(arguments.files)  # before the long work: they may be wrong
    model = sv_jax.load_model(arguments.model, dtype="float32", progress=False)
    moe, tokenizer = model.target.config.moe, model.tokenizer
    if arguments.part == "experts" and moe is None:
        sys.exit(f"{arguments.model} has no experts")
    texts = {"context": arguments.context + 16, "measured": arguments.measured, "seed": 0}
    cases = make_cases(arguments.kind, tokenizer, limit=arguments.documents, **texts)
    store = Store(Path(arguments.output) / "results.jsonl")
    run = PartRun(model, store, arguments.num_speculative_tokens, arguments.seed)
    if arguments.part == "files":
        rows = measure(run, cases, settings)
    elif arguments.part == "ffn":
        activity = watch_calibration(model, arguments.calibration_documents)
        settings = channel_settings(activity)
        rows = measure(dataclasses.replace(run, static_votes=activity.votes), cases, settings)
    else:
        assert moe is not None
        activity = watch_calibration(model, arguments.calibration_documents)
        # Weights that are made to sum to 1 are to do so afterwards; others stay as they are.
        settings = expert_settings(activity, moe.num_experts_per_tok, moe.norm_topk_prob)
        rows = measure(run, cases, settings)
        layers = sum(model.target.config.has_experts(i) for i in range(model.target.config.num_layers))
        lists = shortlist_settings(rows, layers, moe.num_experts, moe.norm_topk_prob)
        rows += measure(run, cases, lists)
        settings += lists
    generated = generate(run, cases, settings, arguments.generated, arguments.new_tokens)
    print("\n".join(markdown(part_table(rows, generated))), file=sys.stderr)
    if "dense" in generated:
        print(f"dense: {acceptance(generated['dense']).value:.2f} tokens a step", file=sys.stderr)
    result = {
        "model": model.provenance,
        "commit": commit(),
        "machine": {"cpu": cpu_name(), "threads": available_cores()},
        "versions": versions(),
        "arguments": vars(arguments),
        "rows": [as_document(row) | {"ratio": row.ratio} for row in rows],
        "acceptance": {name: dataclasses.astuple(acceptance(t)) for name, t in generated.items()},
    }
    print(json.dumps(jsonable(result)))


if __name__ == "__main__":
    main()
