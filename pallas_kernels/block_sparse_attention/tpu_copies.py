"""Copies of selected blocks from HBM into a ring of VMEM buffers, ahead of their use."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
CHUNK = 512  # positions of a full chunk (one block, where that is more)
RING = 4  # chunks in flight or in use: HBM answers late

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
    unroll: bool  # whether there is a hot path

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
            pltpu.VMEM((self.rows, LANES), jnp.float32),  # largest score, unscaled, the same in all lanes
            pltpu.VMEM((self.rows, LANES), jnp.float32),  # sums of exponentials, a part in each lane
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

    def start_next(self) -> None:
        """Starts the chunk at the cursor, if there is one, and moves on."""
        blocks = self.ahead()
        pl.when(blocks > 0)(lambda: self.start_some(blocks))
        self.advance()

    def advance(self) -> None:
        self.cursor[STARTED] += 1
        self.cursor[ENTRY] += self.plan.blocks_per_chunk
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
        pl.loop(0, RING - 1)(lambda _: self.start_next())

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
