"""The body of the Mosaic TPU kernel: what one KV head of one row does with its selected blocks.

The cache stays in HBM. Each grid step walks the selected blocks of its head in chunks of CHUNK positions,
which a ring of VMEM buffers receives ahead of time, across heads too:

    entries of block_indices   |0 1 2 3 4 5 6 7|8 9 ..       head (b, k), 64-position blocks
    chunks                     |    chunk 0    |  chunk 1    the last one may be partial
    slots of the ring                  0             1       2 (first chunk of the next head) ..

A chunk that is full and wholly alive takes the hot path: straight-line code that starts the copies of a later
chunk, waits for its own and multiplies without masks. Whatever else (a partial chunk, the block that holds
the row's length, the edge of a window) goes TAIL positions at a time, masked. So the cost follows the number
of selected blocks, and a head without any costs an empty grid step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cache_attention.reference import matmul_precision

LANES = 128
CHUNK = 512  # positions of a full chunk (one block, where that is more)
TAIL = 128  # positions that the masked path handles at a time
RING = 4  # chunks in flight or in use: HBM answers late
ROW_TILE = 256  # query rows that share one pass of K and V through the matrix units
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: the difference of two of them is 0, not NaN
NOWHERE = 2**30  # a position behind every length
LOG2_E = math.log2(math.e)

ROW, HEAD, ENTRY, STARTED, TAKEN = range(5)
"""The cursor, in SMEM: where the chunk lies that is copied next; chunks copied and used so far."""

Ref = Any


@dataclass(frozen=True)
class Plan:
    """What is static about a call."""

    batch: int
    kv_heads: int
    pack: int  # KV heads side by side in the lanes of a group
    head_dim: int
    lanes: int  # lanes of a group that are copied for one head
    entries: int  # N, entries of block_indices per KV head
    num_blocks: int  # of the cache
    block: int  # positions
    rows: int  # query rows per KV head, padded to whole tiles
    window: int | None
    scale: float  # not negative
    dtype: jnp.dtype
    clamp: bool  # whether indices are clamped to the cache, as XLA's dynamic_slice does
    unroll: bool  # whether the copies of a full chunk are started without a loop

    @property
    def blocks_per_chunk(self) -> int:
        return max(1, CHUNK // self.block)

    @property
    def chunk(self) -> int:
        return self.blocks_per_chunk * self.block

    @property
    def copies_all_lanes(self) -> bool:
        return self.lanes == self.pack * self.head_dim

    def first_lane(self, in_group):
        """Where the copied lanes of a group's head begin: at the tile that holds the head's first lane, or
        so that they end with the group."""
        if self.copies_all_lanes:
            return 0
        last = (self.pack * self.head_dim - self.lanes) // LANES
        if isinstance(in_group, int):
            return min(in_group * self.head_dim // LANES, last) * LANES
        return jnp.minimum(jax.lax.div(in_group * self.head_dim, LANES), last) * LANES

    def scratch(self) -> list[Any]:
        """Buffers of `kernel`, in its order."""
        ring = pltpu.VMEM((RING, self.chunk, self.lanes), self.dtype)
        return [
            ring,
            ring,
            pltpu.SemaphoreType.DMA((2, RING)),
            pltpu.SMEM((5,), jnp.int32),  # cursor
            pltpu.SMEM((RING,), jnp.int32),  # which slots need no mask
            pltpu.VMEM(
                (self.rows, LANES), jnp.float32
            ),  # peak: largest score, unscaled, the same in all lanes
            pltpu.VMEM((self.rows, LANES), jnp.float32),  # total: sums of exponentials, a part in each lane
            pltpu.VMEM((self.rows, self.lanes), jnp.float32),  # weighted V
        ]


@dataclass(frozen=True)
class Ring:
    """Copies selected blocks from HBM into slots of VMEM, ahead of their use."""

    plan: Plan
    indices: Ref  # SMEM int32[B * K * N]
    counts: Ref  # SMEM int32[B * K]
    lengths: Ref  # SMEM int32[B]
    last_query: Ref | None  # SMEM int32[B], largest query position; with a window alone
    hbm: Sequence[Ref]  # K and V [B, G, S, W]
    slots: Sequence[Ref]  # K and V, VMEM [RING, chunk, lanes]
    semaphores: Ref
    cursor: Ref
    clean: Ref

    def index(self, entry):
        """-> the block at an entry of the flat `indices`."""
        index = self.indices[entry]
        return jnp.clip(index, 0, self.plan.num_blocks - 1) if self.plan.clamp else index

    def left(self, row, head, entry):
        """Blocks of the chunk that begins at a head's `entry`; none behind the last row."""
        plan = self.plan
        count = self.counts[jnp.minimum(row * plan.kv_heads + head, plan.batch * plan.kv_heads - 1)]
        return jnp.where(row < plan.batch, jnp.minimum(count - entry, plan.blocks_per_chunk), 0)

    def ahead(self):
        """Blocks of the chunk at the cursor."""
        return self.left(self.cursor[ROW], self.cursor[HEAD], self.cursor[ENTRY])

    def start_block(self, index, slot, i) -> None:
        plan, row, head = self.plan, self.cursor[ROW], self.cursor[HEAD]
        source: tuple[Any, ...] = (pl.ds(pl.multiple_of(index * plan.block, plan.block), plan.block),)
        group = head if plan.pack == 1 else jax.lax.div(head, plan.pack)
        if not plan.copies_all_lanes:
            lane = pl.multiple_of(plan.first_lane(jax.lax.rem(head, plan.pack)), LANES)
            source = (*source, pl.ds(lane, plan.lanes))
        target = pl.ds(pl.multiple_of(i * plan.block, plan.block), plan.block)
        for which, (hbm, slots) in enumerate(zip(self.hbm, self.slots)):
            pltpu.make_async_copy(
                hbm.at[(row, group, *source)], slots.at[slot, target], self.semaphores.at[which, slot]
            ).start()

    def first_entry(self):
        plan, cursor = self.plan, self.cursor
        return (cursor[ROW] * plan.kv_heads + cursor[HEAD]) * plan.entries + cursor[ENTRY]

    def is_clean(self, blocks, oldest, newest):
        """Whether a chunk needs no mask, from its number of blocks and the range of their indices."""
        plan, row = self.plan, self.cursor[ROW]
        clean = (blocks == plan.blocks_per_chunk) & ((newest + 1) * plan.block <= self.lengths[row])
        if plan.window is not None:
            assert self.last_query is not None
            clean &= oldest * plan.block > self.last_query[row] - plan.window
        return clean.astype(jnp.int32)

    def start_full(self) -> None:
        """Starts the chunk at the cursor, which is full, in straight-line code."""
        blocks, first = self.plan.blocks_per_chunk, self.first_entry()
        slot = jax.lax.rem(self.cursor[STARTED], RING)
        chosen = [self.index(first + i) for i in range(blocks)]
        oldest, newest = functools.reduce(jnp.minimum, chosen), functools.reduce(jnp.maximum, chosen)
        self.clean[slot] = self.is_clean(blocks, oldest, newest)
        for i, index in enumerate(chosen):
            self.start_block(index, slot, i)

    def start_some(self, blocks) -> None:
        """Starts the chunk at the cursor, of any number of blocks."""
        first, slot = self.first_entry(), jax.lax.rem(self.cursor[STARTED], RING)

        def start(i, extremes):
            oldest, newest = extremes
            index = self.index(first + i)
            self.start_block(index, slot, i)
            return jnp.minimum(oldest, index), jnp.maximum(newest, index)

        extremes = jax.lax.fori_loop(0, blocks, start, (jnp.int32(self.plan.num_blocks), jnp.int32(0)))
        self.clean[slot] = self.is_clean(blocks, *extremes)

    def start_next(self, unroll: bool) -> None:
        """Starts the chunk at the cursor, if there is one, and moves on."""
        blocks, full = self.ahead(), self.plan.blocks_per_chunk
        if unroll:
            pl.when(blocks == full)(self.start_full)
        pl.when((blocks > 0) & ((blocks < full) | (not unroll)))(lambda: self.start_some(blocks))
        self.cursor[STARTED] += 1
        self.cursor[ENTRY] += full
        pl.when(self.ahead() <= 0)(self.seek)

    def seek(self) -> None:
        """Moves the cursor to the next head that has blocks, or behind the last row."""

        def is_done(place):
            return (place[0] < self.plan.batch) & (self.left(place[0], place[1], 0) <= 0)

        def next_head(place):
            row, head = place
            is_last = head == self.plan.kv_heads - 1
            return jnp.where(is_last, row + 1, row), jnp.where(is_last, 0, head + 1)

        place = self.cursor[ROW], self.cursor[HEAD]
        row, head = jax.lax.while_loop(is_done, next_head, next_head(place))
        self.cursor[ROW], self.cursor[HEAD], self.cursor[ENTRY] = row, head, 0

    def begin(self) -> None:
        """At the first grid step: fills the ring."""
        self.cursor[ROW], self.cursor[HEAD], self.cursor[ENTRY] = 0, 0, 0
        self.cursor[STARTED], self.cursor[TAKEN] = 0, 0
        pl.when(self.ahead() <= 0)(self.seek)
        pl.loop(0, RING - 1)(lambda _: self.start_next(unroll=False))

    def wait(self, slot, blocks=None) -> None:
        """Waits for the first `blocks` of a slot, or for all of it at once: semaphores count bytes."""
        block = self.plan.block

        def wait(positions):
            for which, slots in enumerate(self.slots):
                part = slots.at[slot, positions]
                pltpu.make_async_copy(part, part, self.semaphores.at[which, slot]).wait()

        if blocks is None:
            wait(slice(None))
        else:
            pl.loop(0, blocks)(lambda i: wait(pl.ds(pl.multiple_of(i * block, block), block)))


@dataclass(frozen=True)
class Head:
    """Online softmax of the rows of one KV head over chunks of positions."""

    plan: Plan
    in_group: Any  # which of the KV heads of a group this is
    q: Ref  # [rows, lanes], zero outside the head's own lanes
    query_positions: Ref | None  # int32[rows, 1]; with a window alone
    peak: Ref
    total: Ref
    weighted: Ref

    def attend(self, keys: Ref, values: Ref, mask=None) -> None:
        """Takes in the positions of two buffers [n, lanes]; mask is a function of a slice of the rows."""
        for start in range(0, self.plan.rows, ROW_TILE):
            rows = pl.ds(start, min(ROW_TILE, self.plan.rows - start))
            self._attend_rows(rows, keys, values, None if mask is None else mask(rows))

    def _attend_rows(self, rows, keys: Ref, values: Ref, mask: jax.Array | None) -> None:
        plan = self.plan
        matmul = functools.partial(
            jax.lax.dot_general, precision=matmul_precision(plan.dtype), preferred_element_type=jnp.float32
        )
        scores = matmul(self.q[rows], self._own_lanes(keys[...]), (((1,), (1,)), ((), ())))
        if mask is not None:
            scores = jnp.where(mask, scores, MASKED)
        before = self.peak[rows]
        peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        # The scale is applied in float32, together with the change of base: the hardware has 2**x.
        factor = plan.scale * LOG2_E
        decay = jnp.exp2((before - peak) * factor)
        total = self.total[rows] * decay
        weights = []
        for lane in range(0, scores.shape[1], LANES):
            weight = jnp.exp2((scores[:, lane : lane + LANES] - peak) * factor)
            if mask is not None:
                weight = jnp.where(mask[:, lane : lane + LANES], weight, 0.0)
            total += weight
            weights.append(weight.astype(plan.dtype))
        product = matmul(jnp.concatenate(weights, axis=1), values[...], (((1,), (0,)), ((), ())))
        self.peak[rows], self.total[rows] = peak, total
        decay = jnp.concatenate([decay] * -(-plan.lanes // LANES), axis=1)[:, : plan.lanes]
        self.weighted[rows] = self.weighted[rows] * decay + product

    def _own_lanes(self, keys: jax.Array) -> jax.Array:
        """Zeros for the lanes of neighbouring heads: the block may be dead to them, and hold NaN."""
        plan = self.plan
        if plan.pack == 1:
            return keys
        lane = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 1) + plan.first_lane(self.in_group)
        own = (lane >= self.in_group * plan.head_dim) & (lane < (self.in_group + 1) * plan.head_dim)
        return jnp.where(own, keys, jnp.zeros((), keys.dtype))

    def begin(self) -> None:
        self.peak[...] = jnp.full_like(self.peak, MASKED)
        self.total[...] = jnp.zeros_like(self.total)
        self.weighted[...] = jnp.zeros_like(self.weighted)

    def finish(self, out: Ref, lse: Ref) -> None:
        """out [rows, lanes] and lse [1, rows]."""
        total = jnp.sum(self.total[...], axis=1, keepdims=True)
        some = total > 0
        total = jnp.where(some, total, 1.0)
        out[...] = jnp.where(some, self.weighted[...] / total, 0.0)
        of_row = jnp.where(some, self.peak[...] * self.plan.scale + jnp.log(total), -jnp.inf)
        lse[...] = jnp.transpose(of_row)[:1]


def positions_in_chunk(ring: Ring, first, entry, blocks, offset, shape: tuple[int, int]) -> jax.Array:
    """int32 positions in the cache of a chunk's slots from `offset` on, NOWHERE past its `blocks`.

    first: where the head's entries begin in the flat indices; entry: the chunk's first one.
    """
    plan, axis = ring.plan, shape.index(max(shape))
    slot = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    positions = jnp.full(shape, NOWHERE, jnp.int32)
    for i in range(-(-shape[axis] // plan.block)):
        which = jax.lax.div(offset, plan.block) + i
        index = ring.index(first + jnp.minimum(entry + which, plan.entries - 1))
        begin = index * plan.block + jax.lax.rem(offset, plan.block) - i * plan.block
        inside = slot >= i * plan.block
        positions = jnp.where(inside, jnp.where(which < blocks, begin + slot, NOWHERE), positions)
    return positions


def masked_chunk(ring: Ring, head: Head, row, kv_head, slot, entry, blocks) -> None:
    """Takes in a chunk that is not full, or that not all rows see whole."""
    plan = ring.plan
    step = min(TAIL, plan.chunk)
    first = (row * plan.kv_heads + kv_head) * plan.entries

    @pl.loop(0, pl.cdiv(blocks * plan.block, step))
    def _(part):
        positions = functools.partial(positions_in_chunk, ring, first, entry, blocks, part * step)
        keys, values = (x.at[slot, pl.ds(pl.multiple_of(part * step, step), step)] for x in ring.slots)
        # A weight of 0 would not make NaN harmless.
        alive = positions((step, 1)) < ring.lengths[row]
        values[...] = jnp.where(alive, values[...], jnp.zeros((), plan.dtype))
        along_lanes = positions((1, step))

        def mask(rows):
            seen = jnp.broadcast_to(along_lanes < ring.lengths[row], (rows.size, step))
            if plan.window is not None:
                assert head.query_positions is not None
                seen &= along_lanes > head.query_positions[rows] - plan.window
            return seen

        head.attend(keys, values, mask)


def kernel(plan: Plan, *refs: Ref) -> None:
    """Refs: the scalars (indices, counts, lengths and, with a window, the last query), q, with a window the
    query positions, K and V; out and lse; then `Plan.scratch`."""
    last_query = query_positions = None
    if plan.window is None:
        indices, counts, lengths, q, keys, values, out, lse, *scratch = refs
    else:
        indices, counts, lengths, last_query, q, query_positions, keys, values, out, lse, *scratch = refs
        query_positions = query_positions.at[0]
    key_slots, value_slots, semaphores, cursor, clean, *sums = scratch
    ring = Ring(
        plan,
        indices,
        counts,
        lengths,
        last_query,
        (keys, values),
        (key_slots, value_slots),
        semaphores,
        cursor,
        clean,
    )
    row, kv_head = pl.program_id(0), pl.program_id(1)
    head = Head(plan, jax.lax.rem(kv_head, plan.pack), q.at[0, 0], query_positions, *sums)

    pl.when((row == 0) & (kv_head == 0))(ring.begin)
    head.begin()

    @pl.loop(0, pl.cdiv(counts[row * plan.kv_heads + kv_head], plan.blocks_per_chunk))
    def _(i):
        entry, slot = i * plan.blocks_per_chunk, jax.lax.rem(cursor[TAKEN], RING)
        cursor[TAKEN] += 1
        ring.start_next(plan.unroll)

        @pl.when(clean[slot] == 1)
        def _():
            ring.wait(slot)
            head.attend(key_slots.at[slot], value_slots.at[slot])

        @pl.when(clean[slot] == 0)
        def _():
            blocks = ring.left(row, kv_head, entry)
            ring.wait(slot, blocks)
            masked_chunk(ring, head, row, kv_head, slot, entry, blocks)

    head.finish(out.at[0, 0], lse.at[0, 0])
