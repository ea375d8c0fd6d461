"""The TPU kernel without a TPU: interpreted, against the reference, and what it must not read."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from pallas_kernels.block_sparse_attention import reference, tpu
from pallas_kernels.block_sparse_attention.tpu_kernel import CHUNK

ABSURD = 10**6  # an index past the count


def tolerance(dtype) -> float:
    """float32: another order of the same sums. bfloat16: the weights of the softmax are rounded to 8 bits
    after another maximum was taken off, so each is off by 2**-9 at most, and they average V of size 1."""
    return 1e-5 if jnp.dtype(dtype) == jnp.float32 else 2.0**-7


@dataclass(frozen=True)
class Case:
    head_dim: int = 64
    pack: int = 1
    block: int = 16
    tokens: int = 3
    group: int = 2  # query heads per KV head
    kv_heads: int = 2
    capacity: int = 256
    dtype: str = "float32"
    window: int | None = None

    def __str__(self):
        window = "" if self.window is None else f"-window{self.window}"
        return f"{self.dtype}-D{self.head_dim}x{self.pack}-block{self.block}-T{self.tokens}{window}"

    def lengths(self):
        """One batch with the edges of blocks and of the cache, and rows that have nothing."""
        full, block = self.capacity, self.block
        return np.array([0, 1, full, full - block + 1, full // 2 - 1], np.int32)

    def inputs(self, seed=0):
        """q, K and V [B, K, S, D] with NaN wherever the kernel must not look, indices, counts, lengths,
        positions. Scores reach about 10: the softmax is far from flat."""
        rng = np.random.default_rng(seed)
        lengths, blocks = self.lengths(), self.capacity // self.block
        batch = len(lengths)
        q = rng.normal(size=(batch, self.tokens, self.kv_heads * self.group, self.head_dim))
        k, v = rng.normal(size=(2, batch, self.kv_heads, self.capacity, self.head_dim))
        indices = np.array(
            [[rng.permutation(blocks) for _ in range(self.kv_heads)] for _ in lengths], np.int32
        )
        counts = rng.integers(0, blocks + 1, (batch, self.kv_heads)).astype(np.int32)
        counts[2] = [blocks, 0] * (self.kv_heads // 2)
        past = np.arange(blocks) >= counts[..., None]
        selected = np.zeros((batch, self.kv_heads, blocks), bool)
        np.put_along_axis(selected, indices, ~past, axis=2)
        alive = np.repeat(selected, self.block, axis=2)
        alive &= np.arange(self.capacity) < lengths[:, None, None]
        k, v = (np.where(alive[..., None], x, np.nan) for x in (k, v))
        positions = lengths[:, None] + np.arange(self.tokens, dtype=np.int32)
        q, k, v = (jnp.asarray(x, self.dtype) for x in (3 * q, k, v))
        return q, k, v, np.where(past, ABSURD, indices), counts, lengths, positions


def packed(cache, pack):
    """[B, K, S, D] -> [B, K / pack, S, pack * D]."""
    batch, kv_heads, capacity, head_dim = cache.shape
    cache = jnp.reshape(cache, (batch, kv_heads // pack, pack, capacity, head_dim))
    return jnp.swapaxes(cache, 2, 3).reshape(batch, kv_heads // pack, capacity, pack * head_dim)


def run(case, inputs, interpret=True):
    q, k, v, indices, counts, lengths, positions = inputs

    @jax.jit
    def kernel(q, k, v, indices, counts, lengths, positions):
        return tpu.block_sparse_attention(
            q,
            packed(k, case.pack),
            packed(v, case.pack),
            indices,
            counts,
            lengths,
            block_size=case.block,
            window=case.window,
            positions=positions,
            scale=case.head_dim**-0.5,
            interpret=interpret,
        )

    return jax.device_get(kernel(*(jnp.asarray(x) for x in inputs)))


def expected(case, inputs):
    q, k, v, indices, counts, lengths, positions = (jnp.asarray(x) for x in inputs)
    return jax.device_get(
        reference.block_sparse_attention(
            q,
            k,
            v,
            indices,
            counts,
            lengths,
            block_size=case.block,
            layout="BKSD",
            window=case.window,
            positions=positions,
            scale=case.head_dim**-0.5,
        )
    )


def check(result, wanted, atol):
    for got, want in zip(result, wanted):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, atol=atol, rtol=atol)


CASES = [
    Case(head_dim=64, tokens=1),
    Case(head_dim=64, pack=2, block=32, tokens=16),
    Case(head_dim=96, pack=4, block=16, tokens=3, kv_heads=8),
    Case(head_dim=96, block=64, tokens=8),
    Case(head_dim=128, block=8, tokens=3),
    Case(head_dim=128, block=128, tokens=64, capacity=512),
    Case(head_dim=256, block=256, tokens=3, capacity=1024),
    Case(head_dim=128, block=64, tokens=8, capacity=2048, group=4),
    Case(head_dim=64, pack=2, block=64, tokens=3, capacity=2048, window=700),
    Case(head_dim=128, block=32, tokens=64, group=8, capacity=2048, window=40),
]
CASES += [
    Case(head_dim=64, pack=2, block=16, tokens=16, dtype="bfloat16"),
    Case(head_dim=96, pack=4, block=32, tokens=1, kv_heads=4, dtype="bfloat16"),
    Case(head_dim=128, block=64, tokens=64, capacity=2048, dtype="bfloat16"),
    Case(head_dim=128, block=128, tokens=3, capacity=2048, dtype="bfloat16", window=300),
    Case(head_dim=256, block=256, tokens=8, capacity=1024, dtype="bfloat16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case):
    inputs = case.inputs()
    check(run(case, inputs), expected(case, inputs), tolerance(case.dtype))
