"""What has to lie in a chip's memory, by part, in bytes."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, Literal, get_args

import jax

from pallas_kernels.cache_attention.reference import STEP_ROWS
from sv_jax.config import UserError
from sv_jax.engine.buckets import chunk_sizes, round_up
from sv_jax.planning.deployment import LANES, Deployment
from sv_jax.sparsity.plan import AttentionPlan
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import start_state, state_axes

Kind = Literal[
    "embedding", "head", "attention", "feed-forward", "shared experts", "experts", "router", "norms"
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters of one kind. parameters: numbers of one copy of the model."""

    parameters: int
    bytes: int  # of one chip
    matrix_numbers: int  # of one chip, those that are multiplied by the tokens of a step


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of one chip.

    resident: all the time, by part: weights by kind, and the state at its largest bucket.
    step: beside it while a step or a chunk of prefill runs.
    growing: beside it while the cache moves into its last bucket: the state of the bucket before.
    available: what programs can use.
    """

    resident: dict[str, int]
    step: dict[str, int]
    growing: int
    available: int

    @property
    def during_steps(self) -> int:
        return sum(self.resident.values()) + sum(self.step.values())

    @property
    def needed(self) -> int:
        """At the most demanding moment."""
        return sum(self.resident.values()) + max(sum(self.step.values()), self.growing)

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def weights_by_kind(deployment: Deployment) -> dict[Kind, Weights]:
    """From the shapes of the model's own parameter tree, and the table of logical axes."""
    shapes, axes = deployment.parameters()
    found: dict[Kind, list[Weights]] = {kind: [] for kind in KINDS}

    def add(path: tuple[Any, ...], leaf: Any, logical: Any) -> None:
        names = [key.key for key in path]
        shard = math.prod(deployment.shard_shape(leaf.shape, logical))
        matrix = shard if leaf.ndim > 1 else 0
        size = deployment.shard_bytes(leaf, logical)
        found[_kind(names)].append(Weights(math.prod(leaf.shape), size, matrix))

    jax.tree_util.tree_map_with_path(add, shapes, axes)
    return {
        kind: Weights(*(sum(column) for column in zip(*map(dataclasses.astuple, parts))))
        for kind, parts in found.items()
        if parts
    }


def _kind(names: list[str]) -> Kind:
    """Of a parameter, by its path in the tree."""
    if names[-1] == "scale":
        return "norms"
    if names[0] in ("embedding", "head"):
        return names[0]  # type: ignore[return-value]
    if names[1] == "attention":
        return "attention"
    assert names[1] == "ffn", names
    kinds: dict[str, Kind] = {
        "router": "router",
        "experts": "experts",
        "shared": "shared experts",
        "shared_gate": "shared experts",
    }
    return kinds.get(names[2], "feed-forward")


def state_bytes(deployment: Deployment, capacity: int) -> dict[str, int]:
    """Of the state that the loop carries, in a bucket of `capacity` slots, by part."""
    request = make_request([1] * deployment.padded_batch, [1] * deployment.padded_batch)
    start = partial(start_state, target=deployment.target, capacity=capacity, sparsity=deployment.sparsity)
    state = jax.eval_shape(lambda: start(request=request))
    sizes = dict.fromkeys(("K/V cache", "block summaries", "tokens and trace"), 0)

    def add(path: tuple[Any, ...], leaf: Any, axes: Any) -> None:
        size = deployment.shard_bytes(leaf, axes)
        field = path[0].name
        if field == "cache":
            sizes["K/V cache"] += round(size * deployment.kv_padding)
        elif field == "summaries":
            padded = round_up(leaf.shape[-1], LANES) if deployment.chip.platform == "tpu" else leaf.shape[-1]
            sizes["block summaries"] += size * padded // leaf.shape[-1]
        else:
            sizes["tokens and trace"] += size

    jax.tree_util.tree_map_with_path(add, state, state_axes(state))
    return {name: size for name, size in sizes.items() if size}


def logits_bytes(deployment: Deployment) -> int:
    """float32[rows, T, vocabulary] of one chip."""
    vocabulary = deployment.config.vocab_size // deployment.shards("vocab")
    return 4 * deployment.rows * deployment.width * vocabulary


def other_temporaries(deployment: Deployment) -> int:
    """An estimate, not a count, of what else a step or a chunk of prefill holds: what is alive is the
    compiler's to decide."""
    config, rows = deployment.config, deployment.rows
    chunk = chunk_sizes(rows, deployment.heads, emulated=False)[-1]
    prefill = _activations(deployment, chunk)
    # Filters and penalties each make logits of their own.
    step = _activations(deployment, deployment.width) + 2 * logits_bytes(deployment)
    group_rows = config.num_heads // config.num_kv_heads * deployment.width
    if group_rows <= STEP_ROWS:  # scores over the whole cache, and their exponentials; beyond: by blocks
        step += 2 * 4 * rows * deployment.kv_heads * group_rows * deployment.capacity
    if (attention := _attention(deployment)) is not None:  # one layer's blocks of K and of V, copied
        kept = attention.most_blocks(deployment.capacity) * attention.block_size
        one = rows * deployment.kv_heads * kept * config.head_dim * deployment.itemsize
        step += 2 * round(one * deployment.kv_padding)
    return max(prefill, step)


def _attention(deployment: Deployment) -> AttentionPlan | None:
    return None if deployment.sparsity is None else deployment.sparsity.attention


def _activations(deployment: Deployment, width: int) -> int:
    """Of one layer, about, for `width` tokens a row; and the new K and V of all layers, until the commit."""
    config, itemsize = deployment.config, deployment.itemsize
    tokens = deployment.rows * width
    among_themselves = 2 * 4 * deployment.rows * deployment.heads * width**2
    residual = tokens * config.hidden_size * (2 * itemsize + 4)
    channels = config.intermediate_size // deployment.shards("ffn")
    pairs = tokens
    if config.moe is not None:
        # Pairs of a token and an expert have static shapes: each chip has room for all of its rows' pairs.
        pairs = tokens_of_experts(deployment, width) * config.moe.num_experts_per_tok
        channels = config.moe.expert_size
    network = pairs * (2 * channels + config.hidden_size) * 4
    new_kv = 2 * config.num_layers * tokens * deployment.kv_heads * config.head_dim * itemsize
    return max(among_themselves, network) + residual + new_kv


def tokens_of_experts(deployment: Deployment, width: int) -> int:
    """Tokens that meet the experts of one chip in a pass of `width` tokens a row: those of its own rows; of
    all rows, if experts are cut over the data axis, too."""
    sharding = deployment.sharding
    shared = [axis for axis in sharding.mesh_axes("experts") if axis in sharding.mesh_axes("batch")]
    return deployment.rows * width * math.prod(sharding.mesh.shape[axis] for axis in shared)


def make_footprint(deployment: Deployment) -> Footprint:
    """Of a context that is full, with as many rows as the batch takes."""
    weights = {f"weights: {kind}": part.bytes for kind, part in weights_by_kind(deployment).items()}
    before = deployment.bucket_before
    return Footprint(
        resident=weights | state_bytes(deployment, deployment.capacity),
        step={
            "logits, float32": logits_bytes(deployment),
            "other temporaries (estimate)": other_temporaries(deployment),
        },
        growing=sum(state_bytes(deployment, before).values()) if before else 0,
        available=deployment.chip.memory,
    )


def shapes_that_fit(deployment: Deployment) -> list[tuple[int, int]]:
    """Meshes (data, model) of as many chips on which the same would fit."""
    fitting = []
    for model in range(1, deployment.chips + 1):
        mesh = deployment.chips // model, model
        if math.prod(mesh) != deployment.chips:
            continue
        try:
            other = dataclasses.replace(deployment, mesh=mesh)
        except UserError:  # does not divide
            continue
        if make_footprint(other).fits:
            fitting.append(mesh)
    return fitting


def spreading_experts_fits(deployment: Deployment) -> bool:
    """Whether the same fits with experts cut over all chips, where they are not."""
    if deployment.config.moe is None or deployment.cuts.expert_shard == "all" or deployment.mesh[0] == 1:
        return False
    try:
        cuts = dataclasses.replace(deployment.cuts, expert_shard="all")
        return make_footprint(dataclasses.replace(deployment, cuts=cuts)).fits
    except UserError:  # does not divide
        return False
