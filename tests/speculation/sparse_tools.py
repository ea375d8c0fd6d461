"""Verification over random caches: dense, sparse, and dense over nothing but the selected blocks."""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packing import pack_heads
from sv_jax.config import ModelConfig
from sv_jax.model.cache import KVCache
from sv_jax.model.cached_attention import Selection
from sv_jax.model.choices import Choices
from sv_jax.model.transformer import Params, Transformer, compute_logits, forward
from sv_jax.sharding import make_sharding
from sv_jax.sparsity.plan import SparsityPlan
from sv_jax.sparsity.selection import make_chooser, summary_scorer
from sv_jax.sparsity.summaries import BlockSummaries, planned_summaries, update_summaries
from sv_jax.speculation.tree import ancestor_mask, existing_nodes, node_depths
from sv_jax.speculation.types import Draft, SpeculationState, Verification
from sv_jax.speculation.verify import verify
from tests.sparsity.plain_selection import plain_summary
from tests.tiny import make_model

CHAIN, TREE = (-1, 0, 1, 2, 3), (-1, 0, 0, 1, 2, 2)  # parents


@functools.cache
def loud_model(model: ModelConfig, dtype: str = "float32") -> tuple[Transformer, Params]:
    """Random weights whose logits have a standard deviation of about 1: an error in them is one in units."""
    target, params = make_model(model, dtype=dtype)
    return target, {**params, "final_norm": {"scale": 10 * params["final_norm"]["scale"]}}


class Step(NamedTuple):
    """A verification and what each layer read."""

    verification: Verification
    chosen: tuple[Selection | None, ...]


def random_cache(
    model: ModelConfig, batch: int, capacity: int, *, group: int = 1, dtype: str = "float32"
) -> KVCache:
    """Keys and values so large that it shows in the logits which of them are read."""
    rng = np.random.default_rng(0)
    shape = (2, model.num_layers, batch, model.num_kv_heads, capacity, model.head_dim)
    keys, values = 2 * rng.normal(size=shape).astype(np.float32)
    # Blocks differ as a whole, not just by the noise of their keys.
    keys += np.repeat(rng.normal(size=(*shape[1:4], capacity // 16, shape[-1])), 16, axis=3)

    def layers(arrays: np.ndarray) -> tuple[jax.Array, ...]:
        return tuple(pack_heads(jnp.asarray(x.swapaxes(1, 2), dtype), group) for x in arrays)

    return KVCache(layers(keys), layers(values))


def random_draft(batch: int, parents: tuple[int, ...]) -> Draft:
    tokens = np.random.default_rng(1).integers(0, 64, (batch, len(parents)))
    return Draft(tokens.astype(np.int32), np.resize(np.array(parents, np.int32), tokens.shape))  # type: ignore[arg-type]


def check_summaries(state: SpeculationState, tolerance: float = 1e-6) -> None:
    """Every statistic of every block that holds a committed key; blocks behind have 0. Heads lie alone."""
    assert state.summaries is not None
    lengths, size = state.lengths.tolist(), state.summaries.block_size
    for keys, summary in zip(state.cache.keys, state.summaries.layers):
        assert summary is not None
        for name, got in summary.items():
            expected = [plain_summary(name, row, n, size) for row, n in zip(np.asarray(keys), lengths)]
            np.testing.assert_allclose(got, expected, atol=tolerance, err_msg=name)


@partial(jax.jit, static_argnames=("model",))
def summaries_of(
    sparsity: SparsityPlan, model: ModelConfig, cache: KVCache, lengths: jax.Array
) -> BlockSummaries:
    """As if all committed tokens had been written in one commit."""
    empty = planned_summaries(sparsity.attention, model, cache.batch, cache.capacity)
    return update_summaries(
        empty, cache, jnp.zeros_like(lengths), lengths, cache.capacity, make_sharding(model)
    )


@partial(jax.jit, static_argnames=("target",))
def run_dense(
    target: Transformer, params: Params, cache: KVCache, lengths: jax.Array, draft: Draft
) -> Verification:
    return verify(target, params, cache, lengths, draft)


@partial(jax.jit, static_argnames=("target",))
def run_sparse(
    target: Transformer,
    params: Params,
    cache: KVCache,
    lengths: jax.Array,
    draft: Draft,
    sparsity: SparsityPlan,
    summaries: BlockSummaries,
    live: jax.Array,
) -> Step:
    plan, seen = sparsity.attention, []
    choose = make_chooser(
        plan,
        summary_scorer(plan, summaries, lengths, existing_nodes(draft.parents)),
        lengths,
        live,
        sharding=target.sharding,
    )

    def record(*arguments):
        seen.append(choose(*arguments))
        return seen[-1]

    return Step(verify(target, params, cache, lengths, draft, Choices(record)), tuple(seen))


@partial(jax.jit, static_argnames=("target",))
def run_compact(
    target: Transformer,
    params: Params,
    cache: KVCache,
    lengths: jax.Array,
    chosen: tuple[Selection, ...],
    draft: Draft,
) -> jax.Array:
    """Logits of dense verification over a cache that holds the selected blocks and nothing else.

    Heads lie alone, and every KV head of a row has the same number of blocks, the last committed one among
    them: so that one length fits all. Keys have their rotation already, so it does not matter where they lie.
    """
    size = chosen[0].block_size
    held = (lengths + size - 1) // size
    kept = jnp.maximum(lengths - (held - chosen[0].num_blocks[:, 0]) * size, 0)

    def gather(x: jax.Array, selection: Selection) -> jax.Array:
        blocks = x.reshape(*x.shape[:2], -1, size, x.shape[-1])
        indices = jnp.clip(selection.block_indices, 0, blocks.shape[2] - 1)[..., None, None]
        return jnp.take_along_axis(blocks, indices, axis=2).reshape(*x.shape[:2], -1, x.shape[-1])

    keys, values = (
        tuple(gather(x, selection) for x, selection in zip(arrays, chosen))
        for arrays in (cache.keys, cache.values)
    )
    ancestors = ancestor_mask(draft.parents)
    positions = lengths[:, None] + node_depths(ancestors)
    compact = KVCache(keys, values)
    hidden = forward(target, params, draft.tokens, positions, compact, kept, ancestors).hidden
    return compute_logits(target, params, hidden)
