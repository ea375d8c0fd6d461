"""The TPU kernel compiled ahead of time by the real compiler, for TPUs that are not there."""

import os
import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pallas_kernels.block_sparse_attention import tpu
from scripts import tpu_bundles

pytest.importorskip("libtpu", reason="nothing is compiled for TPU here: libtpu is not installed")


@pytest.fixture(scope="module")
def topology():
    """Name -> devices to compile for."""
    from jax.experimental import topologies

    for name, value in tpu_bundles.AHEAD_OF_TIME.items():
        os.environ.setdefault(name, value)  # libtpu reads them when it is loaded
    return lambda name: topologies.get_topology_desc(platform="tpu", topology_name=name).devices


@dataclass(frozen=True)
class Shape:
    head_dim: int = 128
    pack: int = 1
    block: int = 64
    tokens: int = 16
    group: int = 4
    kv_heads: int = 4
    capacity: int = 8192
    batch: int = 2
    dtype: str = "bfloat16"
    window: int | None = None

    def __str__(self):
        window = "" if self.window is None else f"-window{self.window}"
        return f"{self.dtype}-D{self.head_dim}x{self.pack}-block{self.block}-T{self.tokens}{window}"

    def arrays(self):
        """Shapes and dtypes of q, K, V, indices, counts, lengths and positions."""
        heads = self.kv_heads
        cache = (self.batch, heads // self.pack, self.capacity, self.pack * self.head_dim)
        q = (self.batch, self.tokens, heads * self.group, self.head_dim)
        indices = (self.batch, heads, self.capacity // self.block)
        floats = [(shape, self.dtype) for shape in (q, cache, cache)]
        integers = [indices, indices[:2], (self.batch,), (self.batch, self.tokens)]
        return [*floats, *((shape, "int32") for shape in integers)]

    def logical_bytes(self):
        return sum(np.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in self.arrays())

    def compile(self, shardings, wrap=lambda function: function):
        """shardings: of each array, or of all of them."""

        def kernel(*arrays):
            return tpu.block_sparse_attention(
                *arrays[:6],
                block_size=self.block,
                window=self.window,
                positions=arrays[6],
                scale=self.head_dim**-0.5,
            )

        arrays = self.arrays()
        if not isinstance(shardings, list):
            shardings = [shardings] * len(arrays)
        arguments = [jax.ShapeDtypeStruct(*x, sharding=s) for x, s in zip(arrays, shardings)]
        # positions are an argument with a window alone: JAX drops what is not used.
        return jax.jit(wrap(kernel)).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def total_bytes(compiled):
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def cache_copies(compiled, shape):
    """Instructions that write an array of the cache's shape."""
    dims = ",".join(str(n) for n in shape.arrays()[1][0])
    names = r"copy|copy-done|transpose|fusion|pad|reshape|convert"
    return re.findall(rf"\[{dims}\]\S* (?:{names})\(.*", compiled.as_text())


SHAPES = [
    Shape(),
    Shape(head_dim=64, pack=2, tokens=64, window=1000),
    Shape(head_dim=96, pack=4, block=32),
    Shape(head_dim=256, block=256, tokens=3),
    Shape(block=16, tokens=1, group=1),
    Shape(block=8, dtype="float32", tokens=8),
    Shape(head_dim=64, pack=2, block=128, dtype="float32", window=1000),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
def test_compiles_without_a_copy_of_the_cache(topology, name, shape):
    compiled = shape.compile(SingleDeviceSharding(topology(name)[0]))
    assert "tpu_custom_call" in compiled.as_text()
    assert not cache_copies(compiled, shape)
    assert total_bytes(compiled) <= 1.1 * shape.logical_bytes()


@pytest.mark.parametrize(
    ("shape", "beyond", "message"),
    [
        (
            Shape(head_dim=256, block=1536, capacity=6144, dtype="float32"),
            {"block": 2048},
            r"bytes of VMEM; allowed on TPU: \d+",
        ),
        (Shape(tokens=64, group=16, kv_heads=1), {"group": 17}, "1088 query rows .*; allowed on TPU: 1024"),
        (
            Shape(block=16, tokens=1, batch=12, kv_heads=32),
            {"batch": 13},
            r"bytes of SMEM; allowed on TPU: \d+",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1"])
def test_the_largest_that_the_check_allows(topology, name, shape, beyond, message):
    """What does not compile must be refused by `check_supported`: just below its limits, all compiles."""
    device = SingleDeviceSharding(topology(name)[0])
    shape.compile(device)
    with pytest.raises(NotImplementedError, match=message):
        replace(shape, **beyond).compile(device)


@pytest.mark.parametrize("head_dim", [64, 96])
def test_heads_that_cannot_be_packed(topology, head_dim):
    """An unpacked head of 64 or 96 takes the 128 lanes of a tile. Left to itself, XLA keeps such a cache with
    its positions in the lanes, and copies all of it for each call; a layout that is pinned avoids that."""
    shape, device = Shape(head_dim=head_dim), SingleDeviceSharding(topology("v5e:2x2")[0])
    assert len(cache_copies(shape.compile(device), shape)) >= 2
    row_major = Format(Layout((0, 1, 2, 3)), device)
    compiled = shape.compile([device, row_major, row_major, device, device, device, device])
    assert not cache_copies(compiled, shape)
    padded = 128 / head_dim
    assert 0.95 * padded < total_bytes(compiled) / shape.logical_bytes() < 1.1 * padded


def test_inside_shard_map(topology):
    """Heads over "model", rows over "data": each device has its own, and nothing is exchanged."""
    mesh = Mesh(np.reshape(topology("v5e:2x2"), (2, 2)), ("data", "model"))
    rows, heads = PartitionSpec("data"), PartitionSpec("data", "model")
    tokens = PartitionSpec("data", None, "model")
    specs = (tokens, heads, heads, heads, heads, rows, rows)

    def wrap(kernel):
        return jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=(tokens, tokens), check_vma=False)

    shape = Shape(head_dim=64, pack=2, kv_heads=8)
    compiled = shape.compile([NamedSharding(mesh, spec) for spec in specs], wrap)
    assert not re.search(r"all-|collective|permute", compiled.as_text())
    assert total_bytes(compiled) <= 1.1 * shape.logical_bytes() / 4


LIMITS = {16: 2 * tpu_bundles.FLOOR, 64: 2.5}
"""Bundles a position in the hot loop, by tokens of a step; a block in each grid step takes 5.8 and 12.3 with
64 positions, 3.1 and 6.3 with 128."""


def test_bundles_per_position():
    """Head_dim 128, four query heads to a KV head, bfloat16, on v5e."""
    shapes = [tpu_bundles.Shape(tokens, block) for tokens in LIMITS for block in (64, 128)]
    results = tpu_bundles.measure(shapes)
    for result in results:
        assert result["per_position"] < LIMITS[result["tokens"]], result
        # All 512 positions of a round, in products of [rows, 128] by [128, 128]: nothing was left out.
        assert result["matmul"] == 2 * 4 * result["tokens"] * 4 // 16, result
    by_shape = {(r["tokens"], r["block_size"]): r["per_position"] for r in results}
    assert by_shape[16, 64] < tpu_bundles.FLOOR and by_shape[64, 64] < 1.5
