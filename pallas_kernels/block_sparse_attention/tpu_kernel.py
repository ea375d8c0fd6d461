"""The body of the Mosaic TPU kernel: what one KV head of one row does with its selected blocks.

The cache stays in HBM. Each grid step walks the selected blocks of its head in chunks of CHUNK positions,
which a ring of VMEM buffers receives ahead of time, across heads too:

    entries of block_indices   |0 1 2 3 4 5 6 7|8 9 ..       head (b, k), 64-position blocks
    chunks                     |    chunk 0    |  chunk 1    the last one may be partial
    slots of the ring                  0             1       2 (first chunk of the next head) ..

A chunk that is full and wholly alive is multiplied at once, without masks; if the next one to copy is full,
too, that is the hot path: straight-line code that starts those copies while the products run. Whatever else
(a partial chunk, the block that holds the row's length, the edge of a window) goes TAIL positions at a time,
masked. So the cost follows the number of selected blocks, and a head without any costs an empty grid step.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.block_sparse_attention.tpu_copies import LANES, RING, TAKEN, Plan, Ref, Ring
from pallas_kernels.cache_attention.reference import matmul_precision

TAIL = 128  # positions that the masked path handles at a time
ROW_TILE = 256  # query rows that share one pass of K and V through the matrix units
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: the difference of two of them is 0, not NaN
NOWHERE = 2**30  # a position behind every length
LOG2_E = math.log2(math.e)


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

    def attend(self, keys: Ref, values: Ref, mask=None, between=None) -> None:
        """Takes in the positions of two buffers [n, lanes].

        mask: function of a slice of the rows -> bool[size, n]. between: called between the loads of K and V
        and their use; the compiler orders all copies and loads of the ring, so only what is started there
        can share its instructions with the products.
        """
        for start in range(0, self.plan.rows, ROW_TILE):
            rows = pl.ds(start, min(ROW_TILE, self.plan.rows - start))
            k, v = keys[...], values[...]
            if between is not None and start == 0:
                between()
            self._attend_rows(rows, k, v, None if mask is None else mask(rows))

    def _attend_rows(self, rows, keys: jax.Array, values: jax.Array, mask: jax.Array | None) -> None:
        plan = self.plan
        matmul = functools.partial(
            jax.lax.dot_general, precision=matmul_precision(plan.dtype), preferred_element_type=jnp.float32
        )
        scores = matmul(self.q[rows], self._own_lanes(keys), (((1,), (1,)), ((), ())))
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
            weights.append(weight)
        product = matmul(
            jnp.concatenate(weights, axis=1).astype(plan.dtype), values, (((1,), (0,)), ((), ()))
        )
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
    first = (row * plan.kv_heads + kv_head) * plan.entries

    @pl.loop(0, pl.cdiv(blocks * plan.block, TAIL))
    def _(part):
        positions = functools.partial(positions_in_chunk, ring, first, entry, blocks, part * TAIL)
        keys, values = (x.at[slot, pl.ds(pl.multiple_of(part * TAIL, TAIL), TAIL)] for x in ring.slots)
        # A weight of 0 would not make NaN harmless.
        alive = positions((TAIL, 1)) < ring.lengths[row]
        values[...] = jnp.where(alive, values[...], jnp.zeros((), plan.dtype))
        along_lanes = positions((1, TAIL))

        def mask(rows):
            seen = jnp.broadcast_to(along_lanes < ring.lengths[row], (rows.size, TAIL))
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
        indices, counts, lengths, q, k_cache, v_cache, out, lse, *scratch = refs
    else:
        indices, counts, lengths, last_query, q, query_positions, k_cache, v_cache, out, lse, *scratch = refs
        query_positions = query_positions.at[0]
    key_slots, value_slots, semaphores, cursor, clean, *sums = scratch
    ring = Ring(
        plan,
        indices,
        counts,
        lengths,
        last_query,
        (k_cache, v_cache),
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
        keys, values = key_slots.at[slot], value_slots.at[slot]
        is_hot = (clean[slot] == 1) & (ring.ahead() == plan.blocks_per_chunk) & plan.unroll

        @pl.when(is_hot)
        def _():
            ring.wait(slot)
            head.attend(keys, values, between=ring.start_full)
            ring.advance()

        @pl.when(jnp.logical_not(is_hot))
        def _():
            ring.start_next()

            @pl.when(clean[slot] == 1)
            def _():
                ring.wait(slot)
                head.attend(keys, values)

            @pl.when(clean[slot] == 0)
            def _():
                blocks = ring.left(row, kv_head, entry)
                ring.wait(slot, blocks)
                masked_chunk(ring, head, row, kv_head, slot, entry, blocks)

    head.finish(out.at[0, 0], lse.at[0, 0])
