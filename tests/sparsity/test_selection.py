"""Which blocks a step reads, against plain_selection.py: hundreds of rows in one batch."""

import dataclasses
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.model.cache import KVCache
from sv_jax.sharding import make_sharding
from sv_jax.sparsity.config import SCORES
from sv_jax.sparsity.plan import SparsityPlan
from sv_jax.sparsity.selection import (
    budget_tokens,
    count_blocks,
    make_chooser,
    score_blocks,
    select_blocks,
    summary_scorer,
)
from sv_jax.sparsity.summaries import planned_summaries, update_summaries
from tests.sparsity.plain_selection import (
    plain_blocks,
    plain_choice,
    plain_selection,
    plain_tokens,
)
from tests.test_sharding import ODD
from tests.tiny import TINY, attention_plan, make_target, replace

# Layers 0 and 2 see everything, 1 and 3 a window; three query heads share a KV head.
MODEL = replace(TINY, num_layers=4, num_heads=6, sliding_windows=(None, 75, None, 75))
CAPACITY, BLOCK, ROWS = 192, 16, 200


def sets(indices, counts):
    """Per row and KV head the blocks that count, after checking that they ascend, each once."""
    result = []
    for row, row_counts in zip(np.asarray(indices), np.asarray(counts)):
        result.append([head[:count].tolist() for head, count in zip(row, row_counts)])
        assert all(blocks == sorted(set(blocks)) for blocks in result[-1])
    return result


def test_budgets():
    """The piecewise budget in exact arithmetic, and float32's one token less where 53 % of 100 is 53."""
    rng = np.random.default_rng(0)
    edges = [0, 1, 2, 1023, 1024, 1025, 4095, 4096, 4097, 4106, 131_072]
    lengths = np.array([*edges, *rng.integers(0, 40_000, 1000)], np.int32)
    for l0 in (0, 1, 1024, 4096, 2**31 - 1):
        for rho in ("0", "0.1", "0.25", "0.3", "0.5", "0.7", "1"):
            got = np.asarray(budget_tokens(lengths, jnp.int32(l0), jnp.float32(rho)))
            assert got.tolist() == [plain_tokens(n, l0, rho) for n in lengths.tolist()], (l0, rho)
    got = np.asarray(budget_tokens(lengths, jnp.int32(0), jnp.float32(0.53)))
    missing = np.array([plain_tokens(n, 0, "0.53") for n in lengths.tolist()]) - got
    assert (missing[lengths % 100 != 0] == 0).all() and set(missing) <= {0, 1}


@pytest.mark.parametrize("size", [16, 128])
def test_blocks_of_tokens(size):
    lengths = np.array([0, 1, size - 1, size, size + 1, 7 * size], np.int32)
    assert count_blocks(lengths, size).tolist() == [0, 1, 1, 1, 2, 7]


@pytest.mark.parametrize("sinks", [0, 1, 3, 2**31 - 1])
@pytest.mark.parametrize("local", [1, 2, 9, 2**31 - 1])
def test_choice_within_a_budget(sinks, local):
    """Random scores with many ties, first and last readable blocks, and budgets: 0, below sink and local
    blocks, above all blocks; rows with no readable block."""
    total, heads = 12, 2
    rng = np.random.default_rng(0)
    scores = rng.integers(-3, 4, (ROWS, heads, total)).astype(np.float32)
    held = rng.integers(0, total + 1, ROWS).astype(np.int32)
    first = np.minimum(rng.integers(0, total, ROWS) * rng.integers(0, 2, ROWS), held).astype(np.int32)
    budget = rng.integers(0, total + 3, ROWS).astype(np.int32)
    select = jax.jit(partial(select_blocks, most=total, sink_blocks=sinks, local_blocks=local))
    indices, counts = select(scores, first, held, budget)
    assert indices.shape == (ROWS, heads, total)
    keep = {"sink_blocks": sinks, "local_blocks": local}
    expected = [
        [plain_choice(head.tolist(), *limits, **keep) for head in row]
        for row, limits in zip(scores, zip(first.tolist(), held.tolist(), budget.tolist()))
    ]
    assert sets(indices, counts) == expected
    if sinks + local < total:
        sizes = {len(blocks) for row in expected for blocks in row}
        assert {0, sinks + local, total - 1} <= sizes  # or nothing was tested


def test_no_more_than_the_static_number():
    """What does not fit into N entries is left out, worst first: sinks and local blocks stay."""
    scores = jnp.arange(8.0)[None, None]
    row = [jnp.array([n], jnp.int32) for n in (0, 8, 8)]
    indices, counts = select_blocks(scores, *row, most=4, sink_blocks=1, local_blocks=2)
    assert sets(indices, counts) == [[[0, 5, 6, 7]]]
    indices, counts = select_blocks(scores, *row, most=3, sink_blocks=1, local_blocks=2)
    assert sets(indices, counts) == [[[0, 6, 7]]]


@pytest.mark.parametrize(("mesh", "model"), [((2, 1), TINY), ((4, 2), TINY), ((1, 2), ODD)])
def test_choice_on_meshes(mesh, model):
    """Every shard chooses for its own rows and heads (all heads, where they do not divide)."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(8, model.num_kv_heads, 12)).astype(np.float32)
    held = np.arange(5, 13, dtype=np.int32)
    limits = {"most": 6, "sink_blocks": 1, "local_blocks": 2}
    sharding = make_target(model, mesh).sharding
    placed = jax.device_put(scores, sharding.named("batch", "kv_heads", None))
    select = jax.jit(partial(select_blocks, sharding=sharding, **limits))
    results = select(placed, held * 0, held, held // 2)
    expected = select_blocks(scores, held * 0, held, held // 2, **limits)
    jax.tree.map(np.testing.assert_array_equal, results, expected)
    heads = model.num_kv_heads // (mesh[1] if model is TINY else 1)
    assert results[0].addressable_shards[0].data.shape == (8 // mesh[0], heads, 6)


def test_a_cache_of_one_block():
    """top_k has one score to choose from, and sinks and local blocks overlap."""
    scores, ones = jnp.zeros((2, 2, 1)), jnp.array([1, 0], jnp.int32)
    indices, counts = select_blocks(scores, 0 * ones, ones, ones, most=1, sink_blocks=1, local_blocks=2)
    assert sets(indices, counts) == [[[0], [0]], [[], []]]


@pytest.fixture(scope="module")
def step():
    """Lengths, queries of T = 3 tokens per layer, and a cache in which every key is random."""
    rng = np.random.default_rng(1)
    edges = [0, 1, 15, 16, 17, 47, 48, 49, 64, 65, 74, 75, 76, CAPACITY - 1, CAPACITY]
    lengths = np.array([*edges, *rng.integers(0, CAPACITY + 1, ROWS - len(edges))], np.int32)
    queries = rng.normal(size=(MODEL.num_layers, ROWS, 3, MODEL.num_heads, MODEL.head_dim))
    keys = rng.normal(size=(MODEL.num_layers, ROWS, MODEL.num_kv_heads, CAPACITY, MODEL.head_dim))
    # Blocks differ as a whole, not just by the noise of their keys.
    means = rng.normal(size=(*keys.shape[:3], CAPACITY // BLOCK, MODEL.head_dim))
    keys += np.repeat(means, BLOCK, axis=3)
    return lengths, queries.astype(np.float32), keys.astype(np.float32)


@jax.jit
def choose_all(plan: SparsityPlan, lengths, queries, keys, live):
    """What each layer reads."""
    plan = plan.attention
    cache = KVCache(tuple(keys), tuple(keys))
    start = planned_summaries(plan, MODEL, ROWS, CAPACITY)
    summaries = update_summaries(
        start, cache, jnp.zeros_like(lengths), lengths, CAPACITY, make_sharding(MODEL)
    )
    sharding = make_target(MODEL).sharding
    nodes = jnp.ones(queries[0].shape[:2], bool)
    score = summary_scorer(plan, summaries, lengths, nodes)
    choose = make_chooser(plan, score, lengths, live, sharding=sharding)
    chosen = ()
    for layer, (q, k) in enumerate(zip(queries, keys)):
        chosen += (choose(layer, q, (k, k), chosen),)
    return chosen


LIVE = np.ones(ROWS, bool)
PLANS = {
    "mean": {"keep": 0.5},
    "mean, more sinks": {"keep": 0.4, "sink_blocks": 2, "local_blocks": 1},
    "bound": {"keep": 0.5, "score": "bound"},
    "piecewise": {"l0": 60, "rho": 0.3},
    "a window of recent blocks": {"l0": 0, "rho": 0.0, "sink_blocks": 0, "local_blocks": 3},
    "everything": {"keep": 1.0},
    "more sinks and local blocks than there are": {"keep": 0.1, "sink_blocks": 9, "local_blocks": 9},
}

BY_SCORE = ("mean", "mean, more sinks", "bound", "piecewise")  # budgets above sink and local blocks


@pytest.mark.parametrize("name", PLANS)
def test_selection_of_a_step(name, step):
    """Scores over keys by definition, budgets, windows; every layer of every row."""
    lengths, queries, keys = step
    sparsity = attention_plan(MODEL, block_size=BLOCK, **({"score": "mean"} | PLANS[name]))
    plan = sparsity.attention
    chosen = choose_all(sparsity, lengths, queries, keys, LIVE)
    rules = {"l0": plan.most_l0, "rho": str(plan.most_rho), "block_size": BLOCK}
    rules |= {"sink_blocks": plan.sink_blocks, "local_blocks": plan.local_blocks}
    for layer, selection in enumerate(chosen[:2]):
        window = MODEL.sliding_window(layer)
        expected = [
            plain_selection(plan.score, q[0], k, n, window=window, **rules)
            for q, k, n in zip(queries[layer], keys[layer], lengths.tolist())
        ]
        assert sets(selection.block_indices, selection.num_blocks) == expected
        if window is None and name in BY_SCORE:
            assert sum(blocks != others for blocks, others in expected) > ROWS / 4
        assert selection.block_indices.shape[2] == plan.most_blocks(CAPACITY)
        assert selection.block_size == BLOCK
        if window is None and name == "everything":
            assert expected == [[list(range(plain_blocks(n, BLOCK)))] * 2 for n in lengths.tolist()]


def test_the_root_alone_selects(step):
    """The paper's score: drafted tokens use the root's set, and their own queries, even NaN, do not show."""
    lengths, queries, keys = step
    plan = attention_plan(MODEL, block_size=BLOCK, keep=0.5, score="mean")
    drafted = np.arange(3)[:, None, None] > 0
    before = choose_all(plan, lengths, queries, keys, LIVE)
    after = choose_all(plan, lengths, np.where(drafted, np.nan, queries).astype(np.float32), keys, LIVE)
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_keys_behind_the_length_do_not_select(step):
    """Rejected drafts and whatever else lies there: NaN changes no choice."""
    lengths, queries, keys = step
    dead = np.arange(CAPACITY)[:, None] >= lengths[:, None, None, None]
    for score in SCORES:
        plan = attention_plan(MODEL, block_size=BLOCK, keep=0.5, score=score)
        before = choose_all(plan, lengths, queries, keys, LIVE)
        after = choose_all(plan, lengths, queries, np.where(dead, np.nan, keys).astype(np.float32), LIVE)
        jax.tree.map(np.testing.assert_array_equal, before, after)


def test_rejected_drafts_that_would_win_do_not(step):
    """Keys just behind the length that point where the root looks: with them their block would be best."""
    _, queries, keys = step
    lengths = np.full(ROWS, 100, np.int32)  # block 6 holds four tokens
    root = queries[:, :, 0].reshape(MODEL.num_layers, ROWS, MODEL.num_kv_heads, -1, MODEL.head_dim).mean(3)
    wanted = keys.copy()
    wanted[:, :, :, 100:112] = 100 * root[:, :, :, None]
    for score in SCORES:
        rules = {"keep": 0.5, "sink_blocks": 0, "local_blocks": 1, "score": score}
        before, after = (
            choose_all(attention_plan(MODEL, block_size=BLOCK, **rules), lengths, queries, k, LIVE)
            for k in (keys, wanted)
        )
        jax.tree.map(np.testing.assert_array_equal, before, after)


def test_groups_of_query_heads():
    """KV head k is scored by the query heads k * G .. (k + 1) * G - 1, as attention reads it: planted
    blocks are found, and with the heads in another order, others."""
    group, dim, blocks = 3, 8, 6
    directions = np.eye(dim, dtype=np.float32)
    mean = np.zeros((1, 2, blocks, dim), np.float32)
    mean[0, 0, 3] = mean[0, 1, 4] = directions[0]  # what KV head 0's queries look for
    mean[0, 1, 2] = mean[0, 0, 1] = directions[1]  # what KV head 1's queries look for
    heads = [0] * group + [1] * group
    everything = np.array([blocks], np.int32), np.ones((1, 1), bool), 1
    for order, expected in [(heads, [3, 2]), (heads[::-1], [1, 4])]:
        q = directions[order][None, None]
        for score, summary in [("mean", {"mean": mean}), ("bound", {"low": mean - 0.1, "high": mean + 0.1})]:
            scores = score_blocks(score, q, summary, *everything)
            assert np.argmax(scores, axis=-1).tolist() == [expected]
    q = directions[[0, 1] * group][None, None]  # interleaved: two of the three point elsewhere
    scores = np.asarray(score_blocks("mean", q, {"mean": mean}, *everything))[0]
    np.testing.assert_allclose(
        scores[:, [3, 1, 4, 2]], [[2 / 3, 1 / 3, 0, 0], [0, 0, 1 / 3, 2 / 3]], rtol=1e-6
    )


def test_other_layers_take_their_anchors_set(step):
    """The very arrays: layer 2 reads what 0 chose, 3 what 1 chose (it has the same window)."""
    lengths, queries, keys = step
    plan = attention_plan(MODEL, block_size=BLOCK, keep=0.5, anchors=(0, 1))
    chosen = choose_all(plan, lengths, queries, keys, LIVE)
    alone = choose_all(attention_plan(MODEL, block_size=BLOCK, keep=0.5), lengths, queries, keys, LIVE)
    for layer, anchor in enumerate(plan.attention.anchor_of):
        for got, want in zip(jax.tree.leaves(chosen[layer]), jax.tree.leaves(alone[anchor])):
            np.testing.assert_array_equal(got, want)
    assert (np.asarray(alone[2].block_indices) != np.asarray(alone[0].block_indices)).any()


def test_dense_layers_choose_nothing(step):
    lengths, queries, keys = step
    plan = attention_plan(MODEL, block_size=BLOCK, keep=0.5, dense_layers=(1, 2))
    chosen = choose_all(plan, lengths, queries, keys, LIVE)
    assert [selection is None for selection in chosen] == [False, True, True, False]


@pytest.mark.parametrize("l0", [0, 48, 64])
def test_when_a_batch_is_read_whole(l0, step):
    """Once no live row is above l0; a plan without l0 is never, and has no branch for it."""
    lengths, queries, keys = step
    plan = attention_plan(MODEL, block_size=BLOCK, l0=64, rho=0.1)
    plan = dataclasses.replace(plan, attention=plan.attention.with_budget(l0, 0.1))
    for live, expected in [(lengths <= l0, True), (lengths <= l0 + 1, False), (LIVE, False), (~LIVE, True)]:
        chosen = choose_all(plan, lengths, queries, keys, live)
        assert {bool(selection.whole) for selection in chosen} == {expected}
    never = choose_all(attention_plan(MODEL, block_size=BLOCK, keep=0.5), lengths, queries, keys, LIVE)
    assert {selection.whole for selection in never} == {None}


def test_budgets_change_and_programs_do_not(step):
    """Any l0 and rho up to those of the plan: the same selection as a plan that was made with them."""
    lengths, queries, keys = step
    most = attention_plan(MODEL, block_size=BLOCK, l0=64, rho=0.5, score="mean")
    compiled = choose_all._cache_size()
    for l0, rho in [(64, 0.5), (0, 0.25), (17, 0.0), (0, 0.0), (64, 0.125)]:
        changed = dataclasses.replace(most, attention=most.attention.with_budget(l0, rho))
        selection = choose_all(changed, lengths, queries, keys, LIVE)[0]
        rules = {"l0": l0, "rho": Fraction(rho), "block_size": BLOCK, "sink_blocks": 1, "local_blocks": 2}
        expected = [
            plain_selection("mean", q[0], k, n, **rules) for q, k, n in zip(queries[0], keys[0], lengths)
        ]
        assert sets(selection.block_indices, selection.num_blocks) == expected
    assert choose_all._cache_size() <= compiled + 1
