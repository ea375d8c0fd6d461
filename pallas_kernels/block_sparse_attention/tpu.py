"""Block-sparse attention as a Mosaic TPU kernel: what it takes, and how arrays are laid out for it.

What its hot loop costs on v5e, counted in the compiled code (scripts/tpu_bundles.py; no hardware ran it), in
cycles a position, for head_dim 128 in bfloat16 and four query heads to a KV head, where HBM takes 0.94:

    block          16     32     64    128    256
    16 tokens    1.14   0.84   0.74   0.66   0.60
    64 tokens    1.33   1.30   1.29   1.28   1.27

Sixteen tokens are bound by HBM from blocks of 32 on; with 16, starting two copies a block takes longer. With
64 tokens the matrix units bound it: 256 rows through them take 1.0. Blocks of 64 and more are good; smaller
ones are copies of 8 KiB and less, which HBM may not serve at its full rate.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sparse_attention.tpu_copies import CHUNK, LANES, RING, Plan
from pallas_kernels.block_sparse_attention.tpu_kernel import ROW_TILE, kernel
from pallas_kernels.cache_attention.reference import from_rows, to_rows

MOST_TOKENS = 64
MOST_ROWS = 1024  # query heads of a KV head times tokens: the code grows with them
SUBLANES = {"float32": 8, "bfloat16": 16}  # positions, or query rows, of a tile
VMEM_BYTES = 14 << 20  # of the 16 MiB that a kernel may use by default
SMEM_BYTES = 768 << 10  # of 1 MiB, for the block indices


def chunk_positions(block_size: int) -> int:
    """Positions that a round of the kernel's hot loop covers."""
    return max(1, CHUNK // block_size) * block_size


def copied_lanes(cache_width: int, head_dim: int) -> int:
    """Lanes of a group that are read for one KV head.

    All, up to 128 of them or when the group is one head. Of more, the 256 of the two tiles that a head of
    96 may straddle. So a head of 64 in a pair reads 128 lanes, one of 96 in a group of four 256.
    """
    return cache_width if cache_width <= max(LANES, head_dim) else 2 * LANES


def vmem_bytes(rows: int, lanes: int, block_size: int, itemsize: int) -> int:
    """VMEM that the kernel needs, rows padded to tiles: its buffers and the scores of a tile of rows."""
    chunk, tile = chunk_positions(block_size), min(rows, ROW_TILE)
    wide = -(-lanes // LANES) * LANES
    ring = 2 * RING * chunk * wide * itemsize
    blocks = 2 * rows * wide * (itemsize + 4) + 3 * rows * LANES * 4  # q and out, double-buffered
    sums = rows * (wide + 2 * LANES) * 4
    return ring + blocks + sums + tile * chunk * (4 + itemsize)


def check_supported(
    q_shape: tuple[int, ...],
    cache_shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    *,
    block_size: int,
    entries: int,
) -> None:
    """Whether the kernel compiles: q [B, T, H, D], a cache [B, G, S, W], N entries of block_indices.

    Raises:
      NotImplementedError: it does not; with the value and what is allowed.
    """
    batch, tokens, heads, head_dim = q_shape
    _, groups, _, width = cache_shape
    name = jnp.dtype(dtype).name
    if name not in SUBLANES:
        raise NotImplementedError(f"dtype={name}; allowed on TPU: {', '.join(SUBLANES)}")
    if not 1 <= tokens <= MOST_TOKENS:
        raise NotImplementedError(f"{tokens} tokens in a step; allowed on TPU: 1 to {MOST_TOKENS}")
    least = SUBLANES[name]
    if block_size < least or (LANES % block_size and block_size % LANES):
        raise NotImplementedError(
            f"block_size={block_size} in {name}; allowed on TPU: "
            f"{', '.join(str(n) for n in (8, 16, 32, 64) if n >= least)} and multiples of {LANES}"
        )
    pack = width // head_dim
    if pack > 1 and width % LANES:
        raise NotImplementedError(
            f"{pack} heads of {head_dim} packed to {width} lanes; allowed on TPU: multiples of {LANES}"
        )
    lanes = copied_lanes(width, head_dim)
    rows = -(-heads // (groups * pack) * tokens // least) * least
    if rows > MOST_ROWS:
        raise NotImplementedError(
            f"{rows} query rows of a KV head ({heads} heads, {groups * pack} KV heads, {tokens} tokens); "
            f"allowed on TPU: {MOST_ROWS}"
        )
    need = vmem_bytes(rows, lanes, block_size, jnp.dtype(dtype).itemsize)
    if need > VMEM_BYTES:
        raise NotImplementedError(
            f"block_size={block_size} with {rows} query rows of {lanes} lanes takes {need} bytes of VMEM; "
            f"allowed on TPU: {VMEM_BYTES}"
        )
    scalars = 4 * batch * groups * pack * entries
    if scalars > SMEM_BYTES:
        raise NotImplementedError(
            f"block_indices of {batch} rows, {groups * pack} KV heads and {entries} entries take {scalars} "
            f"bytes of SMEM; allowed on TPU: {SMEM_BYTES}"
        )


def block_sparse_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_indices: jax.Array,
    num_blocks: jax.Array,
    lengths: jax.Array,
    *,
    block_size: int,
    window: int | None,
    positions: jax.Array | None,
    scale: float,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.block_sparse_attention.block_sparse_attention`.

    Caches are [B, G, S, W]: G groups of W // D KV heads side by side. A head in a packed group is read with
    its neighbours, a position of K or V being 128 lanes for head_dim 64 (twice its own) and 256 for 96. An
    unpacked head of 64 or 96 lies, and is read, in 128 lanes: XLA pads them.

    Args:
      interpret: True or InterpretParams to run without a TPU; the latter raise on an index out of range,
        which is clamped on hardware.

    Raises:
      NotImplementedError: see `check_supported`.
    """
    batch, num_tokens, _, head_dim = q.shape
    _, groups, capacity, width = k_cache.shape
    if q.dtype != k_cache.dtype or v_cache.dtype != k_cache.dtype:
        raise NotImplementedError(
            f"q in {q.dtype}, K in {k_cache.dtype}, V in {v_cache.dtype}; allowed on TPU: one dtype"
        )
    check_supported(q.shape, k_cache.shape, q.dtype, block_size=block_size, entries=block_indices.shape[2])
    kv_heads = groups * (width // head_dim)
    rows = to_rows(q if scale >= 0 else -q, kv_heads)
    count, sublanes = rows.shape[2], SUBLANES[q.dtype.name]
    plan = Plan(
        batch=batch,
        kv_heads=kv_heads,
        pack=width // head_dim,
        head_dim=head_dim,
        lanes=copied_lanes(width, head_dim),
        entries=block_indices.shape[2],
        num_blocks=capacity // block_size,
        block=block_size,
        rows=-(-count // sublanes) * sublanes,
        window=window,
        scale=abs(scale),
        dtype=q.dtype,
        clamp=interpret is False,
        # It is much code for the interpreters when a chunk has many blocks.
        unroll=interpret is False or block_size >= LANES,
    )
    rows = _place(plan, jnp.pad(rows, ((0, 0), (0, 0), (0, plan.rows - count), (0, 0))))
    scalars, arrays = [block_indices.reshape(-1), num_blocks.reshape(-1), lengths], [rows]
    if window is not None:
        assert positions is not None
        scalars.append(jnp.max(positions, axis=1))
        of_rows = jnp.tile(positions, (1, count // num_tokens))[..., None]  # [B, R, 1]
        arrays.append(jnp.pad(of_rows, ((0, 0), (0, plan.rows - count), (0, 0))))
    out, lse = _call(plan, scalars, arrays, k_cache, v_cache, interpret)
    out = _pick(plan, out)[:, :, :count]
    return from_rows(out, num_tokens), from_rows(lse[:, :, 0, :count, None], num_tokens)[..., 0]


def _offset(plan: Plan, kv_head: int) -> int:
    """First lane of a head within those that are copied for it."""
    in_group = kv_head % plan.pack
    return in_group * plan.head_dim - plan.first_lane(in_group)


def _place(plan: Plan, rows: jax.Array) -> jax.Array:
    """[B, K, R, D] -> [B, K, R, lanes]: zeros in the lanes of neighbouring heads."""
    if plan.pack == 1:
        return rows
    free = plan.lanes - plan.head_dim
    placed = [
        jnp.pad(rows[:, k], ((0, 0), (0, 0), (_offset(plan, k), free - _offset(plan, k))))
        for k in range(plan.kv_heads)
    ]
    return jnp.stack(placed, axis=1)


def _pick(plan: Plan, out: jax.Array) -> jax.Array:
    """[B, K, R, lanes] -> [B, K, R, D]."""
    if plan.pack == 1:
        return out
    picked = [
        jax.lax.slice_in_dim(out[:, k], _offset(plan, k), _offset(plan, k) + plan.head_dim, axis=2)
        for k in range(plan.kv_heads)
    ]
    return jnp.stack(picked, axis=1)


def _call(plan: Plan, scalars, arrays, k_cache, v_cache, interpret):
    """-> out [B, K, R, lanes], lse [B, K, 1, R], float32."""
    grid = (plan.batch, plan.kv_heads)
    if interpret is False:
        # Or XLA brings all of a cache that fits into VMEM there, unselected blocks and all.
        k_cache, v_cache = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (k_cache, v_cache))

    def per_head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *shape), lambda b, k, *_: (b, k, 0, 0))

    in_specs = [per_head(plan.rows, plan.lanes)]
    if plan.window is not None:
        in_specs.append(pl.BlockSpec((1, plan.rows, 1), lambda b, k, *_: (b, 0, 0)))
    in_specs += [pl.BlockSpec(memory_space=pltpu.HBM)] * 2
    shapes = [(*grid, plan.rows, plan.lanes), (*grid, 1, plan.rows)]
    attended = plan.batch * plan.kv_heads * plan.entries * plan.block
    position_bytes = 2 * plan.lanes * plan.dtype.itemsize
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=in_specs,
            out_specs=[per_head(*shape[2:]) for shape in shapes],
            scratch_shapes=plan.scratch(),
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        # The cursor of the copies goes from step to step: their order matters. Bounds checks would double
        # the scalar work of a copy; indices are clamped instead.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), disable_bounds_checks=True
        ),
        # Of every entry: an upper bound, the counts are data.
        cost_estimate=pl.CostEstimate(
            flops=4 * attended * plan.rows * plan.head_dim,
            transcendentals=attended * plan.rows,
            bytes_accessed=attended * position_bytes + sum(4 * jnp.size(x) for x in arrays),
        ),
        interpret=interpret,
        name="block_sparse_attention",
    )(*scalars, *arrays, k_cache, v_cache)
