r"""Is float32 greedy speculative decoding plain greedy decoding, token for token, on real prompts?

    python scripts/check_lossless.py        # 1x1: 50 prompts x 64 tokens, K = 1, 4, 8, batch 1 and 4
    python scripts/check_lossless.py --meshes 2x1 1x2 4x2 --prompts 12 --num-speculative-tokens 4 \
        --batch-sizes 4

The reference of every run is plain decoding on one device, one prompt at a time. A divergence is
explained only by a top-2 gap of the reference's logits below 1e-3, and is printed. The last line is one
JSON object; the exit code is 1 if a divergence has no such explanation, or if there are more than --allowed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import sv_jax
from sv_jax.engine.lossless import compare_outputs
from sv_jax.sharding import ensure_devices, parse_mesh

PROMPTS = Path(__file__).parent.parent / "tests" / "data" / "prompts.jsonl"


def read_prompts(path: Path, count: int) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-file", type=Path, default=PROMPTS, help="JSON lines with a key prompt")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--meshes", nargs="+", default=["1x1"])
    parser.add_argument("--num-speculative-tokens", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--allowed", type=int, default=2, help="explained divergences")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    meshes = [parse_mesh(text) for text in arguments.meshes]
    ensure_devices(max(data * model for data, model in meshes))
    texts = read_prompts(arguments.prompt_file, arguments.prompts)
    reference_model = sv_jax.load_model(arguments.model, dtype="float32")
    prompts = [reference_model.encode_prompt(text) for text in texts]
    limits = {"max_new_tokens": arguments.max_new_tokens}
    started = time.perf_counter()
    reference = reference_model.generate(prompts, draft_method="none", max_batch_size=1, **limits)
    print(
        f"reference: {len(prompts)} prompts decoded plainly, one at a time, on 1x1; "
        f"{reference.stats.tokens_per_second:.1f} tokens/s, {time.perf_counter() - started:.0f} s",
        file=sys.stderr,
        flush=True,
    )

    runs, divergences = [], []
    for mesh in meshes:
        model = reference_model
        if mesh != (1, 1):
            model = sv_jax.load_model(arguments.model, dtype="float32", mesh=mesh)
        for batch_size in arguments.batch_sizes:
            for k in arguments.num_speculative_tokens:
                started = time.perf_counter()
                result = model.generate(
                    prompts, num_speculative_tokens=k, max_batch_size=batch_size, **limits
                )
                report = compare_outputs(result.outputs, reference.outputs, prompts, reference_model.top2_gap)
                where = f"mesh {mesh[0]}x{mesh[1]}, K = {k}, batch {batch_size}"
                print(
                    f"{where}: {report.identical_rows} of {report.rows} identical, mean acceptance length "
                    f"{result.stats.mean_acceptance_length:.2f}, {time.perf_counter() - started:.0f} s",
                    file=sys.stderr,
                )
                for divergence in report.divergences:
                    print(f"  {where}: {divergence}", file=sys.stderr)
                divergences += report.divergences
                runs.append(
                    {
                        "mesh": f"{mesh[0]}x{mesh[1]}",
                        "num_speculative_tokens": k,
                        "batch_size": batch_size,
                        "rows": report.rows,
                        "identical": report.identical_rows,
                        "lossless": report.lossless,
                        "mean_acceptance_length": result.stats.mean_acceptance_length,
                    }
                )
    passed = all(run["lossless"] for run in runs) and len(divergences) <= arguments.allowed
    gaps = [divergence.top2_gap for divergence in divergences]
    print(json.dumps({"passed": passed, "divergences": len(divergences), "top2_gaps": gaps, "runs": runs}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
