"""The answer, for a person and for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from sv_jax.planning.deployment import Deployment
from sv_jax.planning.floors import Part, Step
from sv_jax.planning.footprint import Footprint, Kind, Weights
from sv_jax.planning.hardware import GIB, smallest_topology
from sv_jax.sparsity.plan import SparsityPlan, describe
from sv_jax.sparsity.reads import kv_bytes

LABEL = "floor, not a measurement; no hardware ran"


@dataclasses.dataclass(frozen=True)
class Answer:
    """All that is known of a deployment without running it.

    origin: of the config. plan: of the sparse steps. steps: of one chip.
    """

    deployment: Deployment
    origin: str
    weights: dict[Kind, Weights]
    footprint: Footprint
    plan: SparsityPlan
    steps: tuple[Step, ...]

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.weights.values())

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers, of one copy of the cache without padding."""
        config = self.deployment.config
        return config.num_layers * config.num_kv_heads * kv_bytes(config, self.deployment.itemsize)

    @property
    def topology(self) -> tuple[str, int] | None:
        return smallest_topology(self.deployment.platform, self.deployment.chips)


def verdict(answer: Answer) -> str:
    """Both numbers in one line, to be printed or raised."""
    footprint, deployment = answer.footprint, answer.deployment
    data, model = deployment.mesh
    needed, available = _gib(footprint.needed), _gib(footprint.available)
    if footprint.fits:
        return f"fits: {needed} of {available} a chip"
    when = "" if footprint.during_steps > footprint.available else " while its cache grows"
    return (
        f"{deployment.name} on {data}x{model} of {deployment.platform} needs {needed} a chip{when}, "
        f"which has {available}"
    )


def notes(answer: Answer) -> list[str]:
    """What the figures leave out or assume."""
    deployment, lines = answer.deployment, []
    if deployment.config.moe is not None:
        moe = deployment.config.moe
        lines.append(
            f"experts read are what an even router is expected to wake, E * (1 - (1 - k/E)^n) of E = "
            f"{moe.num_experts} with k = {moe.num_experts_per_tok} for n tokens: an uneven one wakes fewer, "
            "of which one chip may have more than its share"
        )
    experts = answer.plan.experts
    if experts is not None and experts.max_skipped is not None:
        lines.append("experts that tokens skip by betas are counted as read: that depends on the tokens")
    channels = answer.plan.channels
    if channels is not None and channels.rule != "shared":
        lines.append(f"the rule {channels.rule!r} leaves out arithmetic of single tokens, and saves no bytes")
    if deployment.kv_padding > 1:
        lines.append(
            f"heads of {deployment.config.head_dim} fill tiles of 128 lanes in part: the cache takes "
            f"{deployment.kv_padding:.3g} times its bytes"
        )
    if deployment.dtype == "float32":
        lines.append("the matrix rate is that of bfloat16 products; float32 ones are slower")
    if deployment.rows * deployment.mesh[0] > deployment.batch_size:
        lines.append(f"the batch is padded to {deployment.padded_batch} rows")
    if answer.topology is not None and answer.topology[1] > deployment.chips:
        name, chips = answer.topology
        lines.append(f"{name} has {chips} chips, of which the mesh uses {deployment.chips}")
    if deployment.chip.remark:
        lines.append(deployment.chip.remark)
    lines.append("floors have no collectives, no writes and no waiting: real steps are slower")
    return lines


# For a person.


def report_lines(answer: Answer) -> list[str]:
    """The answer as a table, without what the compiler says."""
    deployment, footprint = answer.deployment, answer.footprint
    chip = deployment.chip
    where = f", topology {answer.topology[0]}" if answer.topology else ""
    lines = [
        f"{deployment.name} ({deployment.config.family}; {answer.origin}): {answer.parameters / 1e9:.2f} "
        f"billion parameters, {answer.token_bytes} bytes of K and V a token",
        *deployment.describe(),
        f"a chip: {_gib(chip.memory)}, {chip.bandwidth / 1e9:.0f} GB/s, "
        f"{chip.matrix_rate / 1e12:.0f} TFLOP/s (published){where}",
        "",
        "memory of a chip, GiB",
    ]
    lines += _memory_lines(footprint)
    lines += [f"  {verdict(answer)}", "", f"a step with the context full, of one chip ({LABEL})"]
    for step in answer.steps:
        lines += _step_lines(step, answer)
    asked = "" if deployment.sparsity else " (not asked for: the paper's budget)"
    lines += ["", f"what sparse steps leave out{asked}:", *describe(answer.plan, deployment.config)]
    lines += ["", *(f"note: {line}" for line in notes(answer))]
    return lines


def _memory_lines(footprint: Footprint) -> list[str]:
    rows = {**footprint.resident, **{f"in a step: {name}": size for name, size in footprint.step.items()}}
    if footprint.growing:
        rows["while the cache grows: the bucket before"] = footprint.growing
    rows["needed in a step"] = footprint.during_steps
    if footprint.needed > footprint.during_steps:
        rows["needed while the cache grows"] = footprint.needed
    width = max(map(len, rows))
    return [f"  {name:<{width}} {size / GIB:9.3f}" for name, size in rows.items()]


def _step_lines(step: Step, answer: Answer) -> list[str]:
    chip = answer.deployment.chip
    lines = [f"{step.verification}, {_tokens(step.width)} a row"]
    if step.experts_per_layer is not None:
        held = answer.deployment.config.moe.num_experts // answer.deployment.shards("experts")  # type: ignore[union-attr]
        lines[0] += f"; {step.experts_per_layer:.1f} of a chip's {held} experts a layer, expected"
    lines.append(f"  {'':<18} {'read, MB':>10} {'GFLOP':>9} {'floor, ms':>10}  by")
    for part in (*step.parts, step.total):
        by = bound(part, answer)
        figures = f"{part.bytes / 1e6:10.1f} {part.flops / 1e9:9.2f} {part.floor_ms(chip):10.3f}"
        lines.append(f"  {part.name:<18} {figures}  {by}")
    return lines


def bound(part: Part, answer: Answer) -> str:
    """What a part's floor comes from: "bytes" or "FLOPs"."""
    chip = answer.deployment.chip
    return "bytes" if part.bytes / chip.bandwidth >= part.flops / chip.matrix_rate else "FLOPs"


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


# For programs.


def document(answer: Answer, fitting: list[tuple[int, int]], check: dict[str, Any] | None) -> dict[str, Any]:
    """The answer for JSON. Sizes are bytes of one chip, times milliseconds.

    fitting: other meshes of as many chips on which it fits, where it does not on this one.
    """
    deployment, footprint, chip = answer.deployment, answer.footprint, answer.deployment.chip
    return {
        "model": {
            "name": deployment.name,
            "family": deployment.config.family,
            "origin": answer.origin,
            "parameters": answer.parameters,
            "kv_bytes_per_token": answer.token_bytes,
            "dtype": deployment.dtype,
        },
        "hardware": {
            "platform": deployment.platform,
            "memory_bytes": chip.memory,
            "bandwidth_bytes_per_second": chip.bandwidth,
            "matrix_flops_per_second": chip.matrix_rate,
            "topology": answer.topology[0] if answer.topology else None,
            "topology_chips": answer.topology[1] if answer.topology else None,
            "figures": "published",
        },
        "mesh": {
            "data": deployment.mesh[0],
            "model": deployment.mesh[1],
            "whole_on_each_chip": sorted(deployment.sharding.replicated),
        },
        "max_model_len": deployment.max_model_len,
        "batch_size": deployment.batch_size,
        "num_speculative_tokens": deployment.num_speculative_tokens,
        "memory": {
            "fits": footprint.fits,
            "needed_bytes": footprint.needed,
            "available_bytes": footprint.available,
            "in_a_step_bytes": footprint.during_steps,
            "resident": footprint.resident,
            "step": footprint.step,
            "growing_bytes": footprint.growing,
            "meshes_that_fit": [f"{data}x{model}" for data, model in fitting],
        },
        "sparsity": {
            "asked_for": deployment.sparsity is not None,
            "description": describe(answer.plan, deployment.config),
        },
        "steps": [_step_document(step, answer) for step in answer.steps],
        "steps_are": LABEL,
        "notes": notes(answer),
        "compile_check": check,
    }


def _step_document(step: Step, answer: Answer) -> dict[str, Any]:
    def one(part: Part) -> dict[str, Any]:
        return {
            "bytes": round(part.bytes),
            "flops": round(part.flops),
            "floor_ms": part.floor_ms(answer.deployment.chip),
            "bound": bound(part, answer),
        }

    return {
        "verification": step.verification,
        "tokens_per_row": step.width,
        "experts_per_layer": step.experts_per_layer,
        "parts": {part.name: one(part) for part in step.parts},
        "total": one(step.total),
    }
