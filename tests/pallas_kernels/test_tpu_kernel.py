"""The TPU kernel without a TPU: interpreted, against the reference, and what it must not read."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from pallas_kernels.block_sparse_attention import reference, tpu, tpu_copies

ABSURD = 10**6  # an index past the count


def tolerance(dtype) -> float:
    """Of the output, with V of size 1. float32: another order of the same sums. bfloat16: weights are rounded
    to 8 bits after another maximum was taken off, each by 2**-9 at most. The lse has float32 throughout."""
    return 1e-5 if jnp.dtype(dtype) == jnp.float32 else 2.0**-8


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

    def inputs(self, poison=True):
        """q, K and V [B, K, S, D] with NaN wherever the kernel must not look, indices, counts, lengths,
        positions. Scores reach about 10: the softmax is far from flat."""
        rng = np.random.default_rng(0)
        lengths, blocks = self.lengths(), self.capacity // self.block
        batch = len(lengths)
        q = rng.normal(size=(batch, self.tokens, self.kv_heads * self.group, self.head_dim))
        k, v = rng.normal(size=(2, batch, self.kv_heads, self.capacity, self.head_dim))
        indices = np.array(
            [[rng.permutation(blocks) for _ in range(self.kv_heads)] for _ in lengths], np.int32
        )
        counts = rng.integers(0, blocks + 1, (batch, self.kv_heads)).astype(np.int32)
        counts[2] = np.resize([blocks, 0], self.kv_heads)
        past = np.arange(blocks) >= counts[..., None]
        selected = np.zeros((batch, self.kv_heads, blocks), bool)
        np.put_along_axis(selected, indices, ~past, axis=2)
        alive = np.repeat(selected, self.block, axis=2)
        alive &= np.arange(self.capacity) < lengths[:, None, None]
        if poison:
            k, v = (np.where(alive[..., None], x, np.nan) for x in (k, v))
        positions = lengths[:, None] + np.arange(self.tokens, dtype=np.int32)
        q, k, v = (jnp.asarray(x, self.dtype) for x in (3 * q, k, v))
        return q, k, v, np.where(past, ABSURD, indices), counts, lengths, positions


def packed(cache, pack):
    """[B, K, S, D] -> [B, K / pack, S, pack * D]."""
    batch, kv_heads, capacity, head_dim = cache.shape
    cache = jnp.reshape(cache, (batch, kv_heads // pack, pack, capacity, head_dim))
    return jnp.swapaxes(cache, 2, 3).reshape(batch, kv_heads // pack, capacity, pack * head_dim)


def kernel(q, k, v, indices, counts, lengths, positions, *, case, scale, interpret):
    return tpu.block_sparse_attention(
        q,
        k,
        v,
        indices,
        counts,
        lengths,
        block_size=case.block,
        window=case.window,
        positions=positions,
        scale=scale,
        interpret=interpret,
    )


@partial(jax.jit, static_argnames=("case", "scale", "interpret"))
def run_packed(q, k, v, *others, case, **options):
    return kernel(q, packed(k, case.pack), packed(v, case.pack), *others, case=case, **options)


def run(case, inputs, interpret=True, scale=None):
    scale = case.head_dim**-0.5 if scale is None else scale
    return jax.device_get(run_packed(*inputs, case=case, scale=scale, interpret=interpret))


@partial(jax.jit, static_argnames="case")
def reference_of(q, k, v, indices, counts, lengths, positions, *, case):
    return reference.block_sparse_attention(
        q,
        k,
        v,
        indices,
        counts,
        lengths,
        block_size=case.block,
        window=case.window,
        positions=positions,
        scale=case.head_dim**-0.5,
    )


def expected(case, inputs):
    return jax.device_get(reference_of(*inputs, case=case))


def check(case, result, wanted):
    for got, want, atol in zip(result, wanted, (tolerance(case.dtype), tolerance("float32"))):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, atol=atol, rtol=atol)


HOT = Case(head_dim=128, block=128, tokens=8, capacity=4096)
"""Chunks enough for those that start a full one while they multiply (with large blocks, when interpreted)."""

CASES = [
    HOT,
    Case(head_dim=96, block=16, tokens=1),
    Case(head_dim=64, pack=2, block=32, tokens=8),
    Case(head_dim=96, pack=4, block=64, tokens=3, kv_heads=8),
    Case(head_dim=256, block=256, tokens=3, capacity=1024),
    Case(head_dim=128, block=32, tokens=64, group=8, capacity=2048, window=40),
    Case(head_dim=64, block=16, tokens=16, dtype="bfloat16"),
    Case(head_dim=96, pack=4, block=32, tokens=1, kv_heads=4, dtype="bfloat16"),
    Case(head_dim=128, block=128, tokens=3, capacity=4096, dtype="bfloat16", window=2000),
    Case(head_dim=256, block=64, tokens=64, capacity=2048, dtype="bfloat16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case):
    """Every row and KV head has its own blocks, in any order; NaN lies in all others and behind lengths."""
    inputs = case.inputs()
    check(case, run(case, inputs), expected(case, inputs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tolerance_shows_one_wrong_block(dtype):
    """One of 24 blocks, of 16 positions, in the place of another: in every query head that reads it."""
    case = Case(block=16, capacity=512, dtype=dtype)
    q, k, v, _, counts, lengths, positions = case.inputs(poison=False)
    counts, lengths = np.full_like(counts, 24), np.full_like(lengths, 512)
    indices = np.broadcast_to(np.arange(32, dtype=np.int32), (*counts.shape, 32))
    wrong = indices.copy()
    wrong[0, 0, 7] = 30
    right, changed = (expected(case, (q, k, v, x, counts, lengths, positions)) for x in (indices, wrong))
    for a, b, bound in zip(right, changed, (tolerance(dtype), tolerance("float32"))):
        away = np.abs(a - b).reshape(*a.shape[:3], -1).max(axis=(1, 3))  # [B, H]
        assert (away[0, : case.group] > 5 * bound).all()
        away[0, : case.group] = 0
        assert (away == 0).all()


def test_heads_without_blocks():
    """At the beginning, in between and at the end; then everywhere."""
    case = Case(head_dim=64, pack=2, block=32, kv_heads=4, capacity=1024)
    q, k, v, indices, _, lengths, positions = case.inputs(poison=False)
    indices = np.broadcast_to(np.arange(32, dtype=np.int32), indices.shape)
    counts = np.array([[0, 0, 0, 0], [0, 3, 0, 32], [32, 0, 17, 16], [0, 0, 0, 0], [1, 0, 0, 0]], np.int32)
    for n in (counts, 0 * counts):
        inputs = (q, k, v, indices, n, np.full_like(lengths, 1000), positions)
        out, lse = run(case, inputs)
        check(case, (out, lse), expected(case, inputs))
        nothing = np.repeat(n == 0, case.group, axis=1)
        assert (out.swapaxes(1, 2)[nothing] == 0).all()
        assert np.isneginf(lse.swapaxes(1, 2)[nothing]).all()


def test_large_scores_and_a_negative_scale():
    q, *others = HOT.inputs()
    out, lse = run(HOT, (100 * q, *others))
    assert np.isfinite(out).all() and not np.isnan(lse).any() and not np.isposinf(lse).any()
    negative = run(HOT, (-q, *others), scale=-(HOT.head_dim**-0.5))
    for got, want in zip(negative, run(HOT, (q, *others))):
        np.testing.assert_array_equal(got, want)


def test_inside_shard_map():
    """KV heads over one axis of a mesh, rows over the other."""
    case = Case(head_dim=64, pack=2, block=64, kv_heads=4, capacity=512)
    q, k, v, indices, counts, lengths, positions = (x[:4] for x in case.inputs())
    inputs = (q, packed(k, 2), packed(v, 2), indices, counts, lengths)
    by_row, by_head = PartitionSpec("data"), PartitionSpec("data", "model")
    tokens = PartitionSpec("data", None, "model")
    sharded = jax.shard_map(
        partial(kernel, case=case, scale=0.125, interpret=True),
        mesh=jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "model")),
        in_specs=(tokens, by_head, by_head, by_head, by_head, by_row, by_row),
        out_specs=(tokens, tokens),
        check_vma=False,
    )
    result = jax.device_get(jax.jit(sharded)(*inputs, positions))
    wanted = expected(case, (q, k, v, indices, counts, lengths, positions))
    check(case, result, wanted)


COMPLAINTS = ("RACE DETECTED", "non-zero count")
"""What the checking interpreter prints: a buffer read before its copy was waited for, or written while it is
read; copies that nobody waited for. It raises on reads outside of the cache."""

CHECKED = [
    Case(head_dim=128, block=128, capacity=2048, kv_heads=1),
    Case(head_dim=96, pack=4, block=256, capacity=1024, kv_heads=4, dtype="bfloat16", window=300),
]


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_no_race_and_no_copy_left(case, capfd):
    inputs = case.inputs()
    result = run(case, inputs, interpret=pltpu.InterpretParams(detect_races=True))
    printed = capfd.readouterr().out
    assert not any(complaint in printed for complaint in COMPLAINTS)
    check(case, result, expected(case, inputs))


def test_a_missing_wait_is_seen(capfd, monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(tpu_copies.Ring, "wait", lambda *_: None)
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    try:
        run(CHECKED[0], CHECKED[0].inputs(), interpret=params)
    except jax.errors.JaxRuntimeError as race:  # from jax 0.12 on; before, it is printed
        assert "RACE DETECTED" in str(race)
        pltpu.reset_tpu_interpret_mode_state()
        return
    printed = capfd.readouterr().out
    assert all(complaint in printed for complaint in COMPLAINTS)


def test_an_index_outside_of_the_cache_is_caught():
    case = CHECKED[0]
    inputs = case.inputs(poison=False)
    inputs[3][2, 0, 0] = case.capacity // case.block
    with pytest.raises(Exception, match="Out-of-bounds read"):
        run(case, inputs, interpret=pltpu.InterpretParams())
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "dtype=float16; allowed on TPU: float32, bfloat16"),
        ({"tokens": 65}, "65 tokens in a step; allowed on TPU: 1 to 64"),
        ({"block_size": 8}, "block_size=8 in bfloat16; allowed on TPU: 16, 32, 64 and multiples of 128"),
        ({"block_size": 8, "dtype": "float32"}, None),
        ({"block_size": 4, "dtype": "float32"}, "allowed on TPU: 8, 16, 32, 64 and multiples of 128"),
        ({"block_size": 96}, "block_size=96 in bfloat16"),
        ({"block_size": 192}, "block_size=192 in bfloat16"),
        ({"block_size": 256}, None),
        ({"block_size": 8192}, "block_size=8192 with 64 query rows of 128 lanes takes .* bytes of VMEM"),
        (
            {"width": 192, "head_dim": 96},
            "2 heads of 96 packed to 192 lanes; allowed on TPU: multiples of 128",
        ),
        ({"width": 384, "head_dim": 96}, None),
        (
            {"entries": 10**5},
            "block_indices of 2 rows, 2 KV heads and 100000 entries take 1600000 bytes of SMEM",
        ),
    ],
)
def test_refusals(changes, message):
    options = {"dtype": "bfloat16", "tokens": 16, "block_size": 64, "width": 128, "head_dim": 128}
    options |= {"entries": 64, **changes}
    groups = 2 * options["head_dim"] // options["width"] or 1
    heads = 4 * groups * (options["width"] // options["head_dim"])
    arguments = ((2, options["tokens"], heads, options["head_dim"]), (2, groups, 8192, options["width"]))

    def check_supported():
        tpu.check_supported(
            *arguments, options["dtype"], block_size=options["block_size"], entries=options["entries"]
        )

    if message is None:
        return check_supported()
    with pytest.raises(NotImplementedError, match=message):
        check_supported()


def test_the_kernel_refuses_what_the_check_refuses():
    case = Case(block=4)
    with pytest.raises(NotImplementedError, match="block_size=4 in float32"):
        run(case, case.inputs())
    case = Case()
    q, *others = case.inputs()
    with pytest.raises(NotImplementedError, match="q in bfloat16, K in float32, V in float32"):
        run(case, (q.astype("bfloat16"), *others))
