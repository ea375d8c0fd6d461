"""Block-sparse attention as a Mosaic TPU kernel.

The cache stays in HBM. Each grid step is one KV head of one row; it walks the head's selected blocks in
chunks of CHUNK positions, which a ring of VMEM buffers receives ahead of time, across heads too:

    blocks of head (b, k)      |0 1 2 3 4 5 6 7|8 9 ..      |   entries of block_indices
    chunks                     |    chunk 0    |  chunk 1   |   the last one may be partial
    ring slots                     0               1            2 (first chunk of the next head) ..

A chunk that is full and wholly alive takes the hot path: one basic block that starts the copies of a later
chunk, waits for its own and multiplies without masks. Whatever else (the last chunk, the block that holds
the row's length, a window's edge) goes through TAIL positions at a time, masked. So the cost follows the
number of selected blocks; a head without any costs an empty grid step.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cache_attention.reference import from_rows, matmul_precision, to_rows

LANES = 128
CHUNK = 512  # positions of a full chunk
TAIL = 128  # positions that the masked path handles at a time
RING = 4  # chunks in flight or in use
ROW_TILE = 64  # query rows whose scores live in registers at once
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: the difference of two of them is 0, not NaN
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Plan:
    """What is static about a call."""

    batch: int
    kv_heads: int
    pack: int  # KV heads side by side in the lanes of a group
    head_dim: int
    lanes: int  # lanes of a group that are copied for one head
    entries: int  # N, entries of block_indices per KV head
    block: int  # positions
    rows: int  # query rows per KV head, padded to whole tiles
    window: int | None
    scale: float
    dtype: jnp.dtype

    @property
    def blocks_per_chunk(self) -> int:
        return max(1, CHUNK // self.block)

    @property
    def chunk(self) -> int:
        return self.blocks_per_chunk * self.block

    def first_lane(self, kv_head):
        """Where the copied lanes of a KV head begin in its group: the tile that holds its first lane."""
        if self.lanes == self.pack * self.head_dim:
            return 0
        in_group = kv_head % self.pack if isinstance(kv_head, int) else jax.lax.rem(kv_head, self.pack)
        return in_group * self.head_dim // LANES * LANES

    def head_offset(self, kv_head: int) -> int:
        """First lane of the head within the copied lanes."""
        return kv_head % self.pack * self.head_dim - self.first_lane(kv_head)


# Cursor of the copies, in SMEM: the chunk that is started next.
ROW, HEAD, ENTRY, STARTED, TAKEN = range(5)


def _kernel(plan: Plan, *refs):
    if plan.window is None:
        (indices, counts, lengths, q, k_hbm, v_hbm, out, lse, *scratch) = refs
        last_query = query_positions = None
    else:
        (indices, counts, lengths, last_query, q, query_positions, k_hbm, v_hbm, out, lse, *scratch) = refs
    k_ring, v_ring, semaphores, cursor, clean, peak_ref, total_ref, out_ref = scratch
    per_chunk, block = plan.blocks_per_chunk, plan.block
    row, head = pl.program_id(0), pl.program_id(1)

    def copies(b, h, entry, slot, i):
        """K and V of the block at `entry` -> i-th block of a slot."""
        at = pl.multiple_of(indices[(b * plan.kv_heads + h) * plan.entries + entry] * block, block)
        source = (b, jax.lax.div(h, plan.pack), pl.ds(at, block))
        if plan.lanes != plan.pack * plan.head_dim:
            source += (pl.ds(pl.multiple_of(plan.first_lane(h), LANES), plan.lanes),)
        target = (slot, pl.ds(pl.multiple_of(i * block, block), block))
        return [
            pltpu.make_async_copy(hbm.at[source], ring.at[target], semaphores.at[which, slot])
            for which, (hbm, ring) in enumerate([(k_hbm, k_ring), (v_hbm, v_ring)])
        ]

    def left(b, h, entry):
        """Blocks of the chunk that begins at `entry`; none when the cursor is behind the last row."""
        count = counts[jnp.minimum(b * plan.kv_heads + h, plan.batch * plan.kv_heads - 1)]
        return jnp.where(b < plan.batch, jnp.minimum(count - entry, per_chunk), 0)

    def start_full():
        """Starts the chunk at the cursor, which is full. Notes whether it can do without masks."""
        b, h, entry, slot = cursor[ROW], cursor[HEAD], cursor[ENTRY], jax.lax.rem(cursor[STARTED], RING)
        first = (b * plan.kv_heads + h) * plan.entries + entry
        chosen = [indices[first + i] for i in range(per_chunk)]
        alive = (functools.reduce(jnp.maximum, chosen) + 1) * block <= lengths[b]
        if plan.window is not None:
            alive &= functools.reduce(jnp.minimum, chosen) * block > last_query[b] - plan.window
        clean[slot] = alive.astype(jnp.int32)
        for i in range(per_chunk):
            for copy in copies(b, h, entry + i, slot, i):
                copy.start()

    def start_partial(blocks):
        b, h, entry, slot = cursor[ROW], cursor[HEAD], cursor[ENTRY], jax.lax.rem(cursor[STARTED], RING)
        clean[slot] = 0

        @pl.loop(0, blocks)
        def _(i):
            for copy in copies(b, h, entry + i, slot, i):
                copy.start()

    def advance(step):
        """Moves the cursor to the next chunk that has blocks, or behind the last row."""

        def next_head(place):
            b, h, _ = place
            end = h == plan.kv_heads - 1
            return jnp.where(end, b + 1, b), jnp.where(end, 0, h + 1), 0

        def is_done(place):
            return (place[0] < plan.batch) & (left(*place) <= 0)

        place = (cursor[ROW], cursor[HEAD], cursor[ENTRY] + step)
        cursor[ROW], cursor[HEAD], cursor[ENTRY] = jax.lax.while_loop(is_done, next_head, place)

    def start_next():
        blocks = left(cursor[ROW], cursor[HEAD], cursor[ENTRY])
        pl.when(blocks == per_chunk)(start_full)
        pl.when((blocks > 0) & (blocks < per_chunk))(lambda: start_partial(blocks))

        @pl.when(blocks > 0)
        def _():
            cursor[STARTED] += 1
            advance(per_chunk)

    def wait(slot, blocks=None):
        """Waits for the first blocks of a slot, or for all of it: semaphores count bytes."""
        for which, ring in enumerate([k_ring, v_ring]):
            if blocks is None:
                whole = ring.at[slot]
                pltpu.make_async_copy(whole, whole, semaphores.at[which, slot]).wait()
            else:

                @pl.loop(0, blocks)
                def _(i, which=which, ring=ring):
                    part = ring.at[slot, pl.ds(pl.multiple_of(i * block, block), block)]
                    pltpu.make_async_copy(part, part, semaphores.at[which, slot]).wait()

    def hot(slot):
        start_full()
        wait(slot)
        keys, values = k_ring.at[slot], v_ring.at[slot]
        for tile in range(0, plan.rows, ROW_TILE):
            rows = pl.ds(tile, min(ROW_TILE, plan.rows - tile))
            _attend(plan, rows, q, keys, values, peak_ref, total_ref, out_ref)

    def masked(slot, entry, blocks):
        positions = _tail_positions(plan, indices, (row * plan.kv_heads + head) * plan.entries, entry, blocks)
        step = min(TAIL, plan.chunk)

        @pl.loop(0, pl.cdiv(blocks * block, step))
        def _(part):
            at = pl.ds(pl.multiple_of(part * step, step), step)
            keys, values = k_ring.at[slot, at], v_ring.at[slot, at]
            along_lanes, along_sublanes = positions(part * step, (1, step)), positions(part * step, (step, 1))
            # A weight of 0 does not make NaN harmless.
            values[...] = jnp.where(along_sublanes < lengths[row], values[...], jnp.zeros((), plan.dtype))
            mask = along_lanes < lengths[row]
            for tile in range(0, plan.rows, ROW_TILE):
                size = min(ROW_TILE, plan.rows - tile)
                rows = pl.ds(tile, size)
                seen = jnp.broadcast_to(mask, (size, step))
                if plan.window is not None:
                    seen &= along_lanes > query_positions[0, rows] - plan.window
                _attend(plan, rows, q, keys, values, peak_ref, total_ref, out_ref, seen)

    def chunk(i, _):
        entry = i * per_chunk
        blocks = left(row, head, entry)
        slot = jax.lax.rem(cursor[TAKEN], RING)
        cursor[TAKEN] += 1
        is_hot = (clean[slot] == 1) & (left(cursor[ROW], cursor[HEAD], cursor[ENTRY]) == per_chunk)

        @pl.when(is_hot)
        def _():
            hot(slot)
            cursor[STARTED] += 1
            advance(per_chunk)

        @pl.when(jnp.logical_not(is_hot))
        def _():
            start_next()
            wait(slot, blocks)
            masked(slot, entry, blocks)

    @pl.when((row == 0) & (head == 0))
    def _():
        for i in range(5):
            cursor[i] = 0
        advance(0)
        for _ in range(RING - 1):
            start_next()

    peak_ref[...] = jnp.full_like(peak_ref, MASKED)
    total_ref[...] = jnp.zeros_like(total_ref)
    out_ref[...] = jnp.zeros_like(out_ref)
    jax.lax.fori_loop(0, pl.cdiv(counts[row * plan.kv_heads + head], per_chunk), chunk, None)

    total = jnp.sum(total_ref[...], axis=1, keepdims=True)
    some = total > 0
    out[0, 0] = out_ref[...] * jnp.where(some, 1.0 / jnp.where(some, total, 1.0), 0.0)
    log = peak_ref[...] * plan.scale + jnp.log(jnp.where(some, total, 1.0))
    lse[0, 0] = jnp.transpose(jnp.where(some, log, -jnp.inf))[:1]


def _tail_positions(plan: Plan, indices, first, entry, blocks):
    """-> function (offset within the chunk, shape) -> int32 positions in the cache; huge past the chunk."""

    def positions(offset, shape):
        axis = shape.index(max(shape))
        lane = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        place = jnp.full(shape, 2**30, jnp.int32)
        for i in range(pl.cdiv(max(shape), plan.block)):
            chosen = jax.lax.div(offset, plan.block) + i
            index = indices[first + jnp.minimum(entry + chosen, plan.entries - 1)]
            base = jnp.where(chosen < blocks, index * plan.block + jax.lax.rem(offset, plan.block), 2**30)
            place = jnp.where(lane >= i * plan.block, base + lane - i * plan.block, place)
        return place

    return positions


def _attend(plan, rows, q, keys, values, peak_ref, total_ref, out_ref, mask=None):
    """One step of the online softmax: rows of q against the positions of a buffer."""
    precision = matmul_precision(plan.dtype)
    k = _own_lanes(plan, keys[...])
    scores = jax.lax.dot_general(
        q[0, 0, rows], k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    if mask is not None:
        scores = jnp.where(mask, scores, MASKED)
    before = peak_ref[rows]
    peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    factor = plan.scale * LOG2_E
    decay = jnp.exp2((before - peak) * factor)
    total = total_ref[rows] * decay
    weights = []
    for at in range(0, scores.shape[1], LANES):
        weight = jnp.exp2((scores[:, at : at + LANES] - peak) * factor)
        if mask is not None:
            weight = jnp.where(mask[:, at : at + LANES], weight, 0.0)
        total += weight
        weights.append(weight.astype(plan.dtype))
    product = jax.lax.dot_general(
        jnp.concatenate(weights, axis=1),
        values[...],
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    peak_ref[rows] = peak
    total_ref[rows] = total
    wide = jnp.concatenate([decay] * pl.cdiv(plan.lanes, LANES), axis=1)[:, : plan.lanes]
    out_ref[rows] = out_ref[rows] * wide + product


def _own_lanes(plan, keys):
    return keys


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
    batch, num_tokens, num_heads, head_dim = q.shape
    groups, width = k_cache.shape[1], k_cache.shape[3]
    pack = width // head_dim
    kv_heads = groups * pack
    lanes = width if width <= LANES or pack == 1 else 2 * LANES
    rows = to_rows(q.astype(k_cache.dtype), kv_heads)
    count = rows.shape[2]
    tile = 8 if k_cache.dtype == jnp.float32 else 16
    plan = Plan(
        batch=batch,
        kv_heads=kv_heads,
        pack=pack,
        head_dim=head_dim,
        lanes=lanes,
        entries=block_indices.shape[2],
        block=block_size,
        rows=-(-count // tile) * tile,
        window=window,
        scale=scale,
        dtype=k_cache.dtype,
    )
    padding = ((0, plan.rows - count), (0, 0))
    rows = jnp.pad(rows, ((0, 0), (0, 0), *padding))
    if pack > 1:
        rows = jnp.stack(
            [
                jnp.pad(rows[:, k], ((0, 0), (0, 0), (plan.head_offset(k), lanes - head_dim - plan.head_offset(k))))
                for k in range(kv_heads)
            ],
            axis=1,
        )
    scalars = [block_indices.reshape(-1), num_blocks.reshape(-1), lengths]
    arrays = [rows]
    head_block = lambda *shape: pl.BlockSpec((1, 1, *shape), lambda b, k, *_: (b, k, 0, 0))
    in_specs = [head_block(plan.rows, lanes)]
    if window is not None:
        scalars.append(jnp.max(positions, axis=1))
        row_positions = jnp.tile(positions, (1, count // num_tokens))
        arrays.append(jnp.pad(row_positions[..., None], ((0, 0), *padding)))
        in_specs.append(pl.BlockSpec((1, plan.rows, 1), lambda b, k, *_: (b, 0, 0)))
    in_specs += [pl.BlockSpec(memory_space=pl.ANY)] * 2
    ring = pltpu.VMEM((RING, plan.chunk, lanes), plan.dtype)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads),
            in_specs=in_specs,
            out_specs=[head_block(plan.rows, lanes), head_block(1, plan.rows)],
            scratch_shapes=[
                ring,
                ring,
                pltpu.SemaphoreType.DMA((2, RING)),
                pltpu.SMEM((5,), jnp.int32),
                pltpu.SMEM((RING,), jnp.int32),
                pltpu.VMEM((plan.rows, LANES), jnp.float32),
                pltpu.VMEM((plan.rows, LANES), jnp.float32),
                pltpu.VMEM((plan.rows, lanes), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, plan.rows, lanes), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, 1, plan.rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="block_sparse_attention",
    )(*scalars, *arrays, k_cache, v_cache)
    if pack > 1:
        out = jnp.stack(
            [out[:, k, :, plan.head_offset(k) : plan.head_offset(k) + head_dim] for k in range(kv_heads)], axis=1
        )
    return from_rows(out[:, :, :count], num_tokens), from_rows(lse[:, :, 0, :count, None], num_tokens)[..., 0]


def chunk_positions(block_size: int) -> int:
    return max(1, CHUNK // block_size) * block_size
