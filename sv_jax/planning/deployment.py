"""The question: a model as it would run on chips of a kind. What follows from it in sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from sv_jax.config import DEFAULT_CUTS, Cuts, ModelConfig, UserError
from sv_jax.engine.buckets import bucket_for, largest_bucket, round_up
from sv_jax.model.transformer import Params, Transformer, logical_params
from sv_jax.planning.hardware import PLATFORMS, Chip
from sv_jax.sharding import PlannedSharding, plan_sharding
from sv_jax.sparsity.plan import SparsityPlan

LANES = 128  # numbers side by side in a TPU's vector registers, and in its tiles of memory


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model on a mesh of chips, with the longest context and the largest batch that it has to take.

    sparsity: of verification; None: dense.

    Raises:
      UserError: the context is longer than the model's, or the model does not divide by the mesh.
    """

    name: str
    config: ModelConfig
    platform: str  # of hardware.PLATFORMS
    mesh: tuple[int, int]  # data x model
    dtype: str
    max_model_len: int
    batch_size: int
    num_speculative_tokens: int
    sparsity: SparsityPlan | None = None
    cuts: Cuts = DEFAULT_CUTS

    def __post_init__(self) -> None:
        context = self.config.max_position_embeddings
        if not 2 <= self.max_model_len <= context:
            raise UserError(f"max_model_len={self.max_model_len}; allowed for {self.name}: 2 to {context}")
        _ = self.sharding  # refuses what does not divide

    @functools.cached_property
    def sharding(self) -> PlannedSharding:
        return plan_sharding(self.config, self.mesh, self.chip.platform, self.cuts)

    @property
    def chip(self) -> Chip:
        return PLATFORMS[self.platform]

    @property
    def chips(self) -> int:
        return math.prod(self.mesh)

    @property
    def target(self) -> Transformer:
        return Transformer(self.config, self.dtype, self.sharding)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def width(self) -> int:
        """T: tokens of a row that a verify step computes."""
        return self.num_speculative_tokens + 1

    @property
    def padded_batch(self) -> int:
        return round_up(self.batch_size, self.sharding.data_size)

    @property
    def rows(self) -> int:
        """Of one chip."""
        return self.padded_batch // self.sharding.data_size

    @property
    def capacity(self) -> int:
        """Slots of a row's cache when its context is full."""
        return largest_bucket(self.max_model_len, self.width, self.shards("kv_length"))

    @property
    def bucket_before(self) -> int:
        """The bucket that a cache grows from into the last one; 0: there is none."""
        last, parts = self.capacity, self.shards("kv_length")
        smaller = {bucket_for(slots, last, parts) for slots in range(LANES, last, LANES)} - {last}
        return max(smaller, default=0)

    def shards(self, logical: str) -> int:
        """Into how many parts a logical axis is cut."""
        return self.sharding.parts(logical)

    @property
    def kv_heads(self) -> int:
        """Of one chip."""
        return self.config.num_kv_heads // self.shards("kv_heads")

    @property
    def heads(self) -> int:
        """Query heads of one chip."""
        return self.config.num_heads // self.shards("heads")

    @property
    def kv_padding(self) -> float:
        """Bytes that a cache takes on the chip for each byte of K and V; above 1 where lanes stay empty.

        A TPU's tiles are 128 lanes wide. Narrow heads are packed side by side into whole tiles, if so many
        divide the chip's KV heads; else each head has tiles of its own.
        """
        if self.chip.platform != "tpu":
            return 1.0
        size = self.config.head_dim
        packed = math.lcm(size, LANES) // size
        return 1.0 if self.kv_heads % packed == 0 else round_up(size, LANES) / size

    def parameters(self) -> tuple[Params, Params]:
        """Shapes and logical axes of the parameters, of one copy of the model."""
        return _parameters(self.config, self.dtype)

    def shard_shape(self, shape: tuple[int, ...], axes: Any) -> tuple[int, ...]:
        """Of an array with these logical axes, the part of one chip."""
        return self.sharding.named(*axes).shard_shape(shape)

    def shard_bytes(self, array: Any, axes: Any) -> int:
        """Of one chip's part."""
        return math.prod(self.shard_shape(array.shape, axes)) * jnp.dtype(array.dtype).itemsize

    def describe(self) -> list[str]:
        """The question in words, a line each."""
        data, model = self.mesh
        whole = ""
        if model > 1 and self.sharding.replicated:
            whole = self.sharding.describe().partition(";")[2]
        rows = f"{self.batch_size} {'rows' if self.batch_size > 1 else 'row'}, {self.rows} a data shard"
        drafted = f"{self.num_speculative_tokens} drafted tokens"
        return [
            f"mesh {data}x{model} (data x model) of {self.platform}{';' if whole else ''}{whole}",
            f"{self.dtype}, context of {self.max_model_len} tokens, {rows}, {drafted} a step",
        ]


@functools.lru_cache(maxsize=4)
def _parameters(config: ModelConfig, dtype: str) -> tuple[Params, Params]:
    # Tracing the whole model takes a second or two; the mesh has no part in shapes or logical axes.
    return logical_params(Transformer(config, dtype, plan_sharding(config, (1, 1), "cpu")))
