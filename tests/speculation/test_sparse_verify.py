"""Verification that reads selected blocks: equal to dense where all are, blind to the rest where not."""

import dataclasses

import jax
import numpy as np
import pytest

from sv_jax.model.cached_attention import Selection
from sv_jax.model.choices import Choices
from sv_jax.model.transformer import forward
from sv_jax.speculation.types import StepReads
from tests.sparsity.plain_selection import plain_blocks, plain_tokens
from tests.speculation.sparse_tools import (
    CHAIN,
    TREE,
    loud_model,
    random_cache,
    random_draft,
    run_compact,
    run_dense,
    run_sparse,
    summaries_of,
)
from tests.tiny import TINY, attention_plan, replace

TOLERANCE = 1e-3  # of logits, whose standard deviation is about 1
GQA = replace(TINY, num_layers=1)
MHA = replace(GQA, num_kv_heads=4)
WINDOWED = replace(TINY, sliding_windows=(40, None))
CAPACITY = 128


def edges(block_size, capacity):
    n = capacity // block_size - 1
    return [0, 1, *(k * block_size + i for k in (1, n) for i in (-1, 0, 1))]


LENGTHS = [*edges(16, CAPACITY), 60, 77, 90, 101]
HELD = [plain_blocks(n, 16) for n in LENGTHS]


def setting(model, lengths=LENGTHS, *, parents=TREE, capacity=CAPACITY, group=1, dtype="float32"):
    """Arguments of run_dense, and of run_sparse up to the plan."""
    cache = random_cache(model, len(lengths), capacity, group=group, dtype=dtype)
    draft = random_draft(len(lengths), parents)
    return *loud_model(model, dtype), cache, np.array(lengths, np.int32), draft


def sparse(arguments, plan, *, live=None, summaries=None):
    target, _, cache, lengths, _ = arguments
    if summaries is None:
        summaries = summaries_of(plan, target.config, cache, lengths)
    live = np.ones(lengths.shape, bool) if live is None else live
    return run_sparse(*arguments, plan, summaries, live)


def distance(logits, others):
    """float[B]: the largest difference of each row, nowhere NaN."""
    difference = np.abs(np.asarray(logits) - np.asarray(others)).max((1, 2))
    assert not np.isnan(difference).any()
    return difference


def check_same_bits(before, after):
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert np.isfinite(before.logits).all()


@pytest.mark.parametrize(
    ("block_size", "model", "parents", "group", "score"),
    [
        (16, GQA, CHAIN, 1, "mean"),
        (32, MHA, TREE, 2, "bound"),
        (64, WINDOWED, TREE, 1, "mean"),
        (128, GQA, CHAIN, 2, "mean"),
    ],
)
def test_everything_kept_is_dense(block_size, model, parents, group, score):
    """Rows around the edges of blocks, an empty one among them."""
    capacity = 2 * max(64, block_size)
    lengths = edges(block_size, capacity)
    arguments = setting(model, lengths, parents=parents, capacity=capacity, group=group)
    dense = run_dense(*arguments)
    assert np.asarray(dense.logits).std() > 0.8  # or the tolerance says little
    plan = attention_plan(model, block_size=block_size, keep=1.0, score=score)
    step = sparse(arguments, plan)
    assert distance(step.verification.logits, dense.logits).max() < TOLERANCE
    for ours, theirs in zip(jax.tree.leaves(step.verification.new_kv), jax.tree.leaves(dense.new_kv)):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    if model is not WINDOWED:
        counts = [[plain_blocks(n, block_size)] * model.num_kv_heads for n in lengths]
        assert all(selection.num_blocks.tolist() == counts for selection in step.chosen)


def test_everything_kept_in_bfloat16():
    arguments = setting(GQA, dtype="bfloat16")
    dense, step = run_dense(*arguments), sparse(arguments, attention_plan(GQA, keep=1.0))
    difference = np.abs(np.asarray(step.verification.logits) - np.asarray(dense.logits))
    assert difference.max() < 0.5 and difference.mean() < 0.02


def check_against_compact(arguments, plan):
    """Dense verification over the selected blocks, copied together, has the same logits; one over all has
    others."""
    target, params, cache, lengths, draft = arguments
    step = sparse(arguments, plan)
    logits = run_compact(target, params, cache, lengths, step.chosen, draft)
    assert distance(step.verification.logits, logits).max() < TOLERANCE
    l0, rho = int(plan.attention.l0), str(plan.attention.rho)
    budgets = [max(plain_blocks(plain_tokens(n, l0, rho), 16), 3) for n in LENGTHS]
    expected = np.minimum(budgets, HELD)
    for selection in step.chosen:
        assert selection.num_blocks[:, 0].tolist() == expected.tolist()
    reads = target.config.num_layers * target.config.num_kv_heads * expected
    assert step.verification.reads.kv_blocks.tolist() == reads.tolist()
    fewer = expected < HELD
    changed = distance(step.verification.logits, run_dense(*arguments).logits)
    assert fewer.sum() > 4 and changed[fewer].min() > 10 * TOLERANCE and changed[~fewer].max() < TOLERANCE


@pytest.mark.parametrize(
    ("model", "parents", "score"), [(GQA, TREE, "mean"), (GQA, TREE, "bound"), (MHA, CHAIN, "mean")]
)
def test_selected_blocks_and_nothing_else(model, parents, score):
    """With half of the context, with sinks and local blocks alone, and above some l0."""
    arguments = setting(model, parents=parents)
    plan = attention_plan(model, l0=40, rho=0.5, score=score)
    for budget in [(0, 0.5), (0, 0.0), (40, 0.25)]:
        check_against_compact(
            arguments, dataclasses.replace(plan, attention=plan.attention.with_budget(*budget))
        )


def poisoned(cache, read):
    """NaN wherever `read`, per layer bool[B, K, S], is False."""

    def layers(arrays):
        return tuple(np.where(mask[..., None], x, np.float32(np.nan)) for mask, x in zip(read, arrays))

    return dataclasses.replace(cache, keys=layers(cache.keys), values=layers(cache.values))


def slots_read(step, lengths):
    """Per layer bool[B, K, S]: committed slots of selected blocks."""
    result = []
    for selection in step.chosen:
        indices, counts = np.asarray(selection.block_indices), np.asarray(selection.num_blocks)
        blocks = np.zeros((*counts.shape, CAPACITY // selection.block_size), bool)
        for row, head in np.ndindex(counts.shape):
            blocks[row, head, indices[row, head, : counts[row, head]]] = True
        alive = np.arange(CAPACITY) < np.asarray(lengths)[:, None, None]
        result.append(np.repeat(blocks, selection.block_size, axis=2) & alive)
    return result


@pytest.mark.parametrize(("model", "anchors"), [(TINY, (0,)), (WINDOWED, None)], ids=["reuse", "windows"])
def test_nan_in_unselected_blocks_and_behind_lengths_changes_no_bit(model, anchors):
    """Of logits, keys and values, in every layer."""
    arguments = setting(model)
    target, params, cache, lengths, draft = arguments
    plan = attention_plan(model, keep=0.5, anchors=anchors)
    summaries = summaries_of(plan, model, cache, lengths)
    step = sparse(arguments, plan, summaries=summaries)
    read = slots_read(step, lengths)
    left_out = sum((~mask & (np.arange(CAPACITY) < lengths[:, None, None])).sum() for mask in read)
    assert left_out > 1000
    dirty = (target, params, poisoned(cache, read), lengths, draft)
    check_same_bits(step.verification, sparse(dirty, plan, summaries=summaries).verification)


@pytest.mark.parametrize("score", ["mean", "mass"])
def test_nan_behind_lengths_is_not_summarised_either(score):
    """The same with summaries of the poisoned cache: what was rejected plays no part in scores."""
    arguments = setting(GQA)
    target, params, cache, lengths, draft = arguments
    alive = np.broadcast_to((np.arange(CAPACITY) < lengths[:, None])[:, None], (len(lengths), 2, CAPACITY))
    dirty = (target, params, poisoned(cache, [alive] * GQA.num_layers), lengths, draft)
    plan = attention_plan(GQA, keep=0.5, score=score)
    before, after = (sparse(these, plan).verification for these in (arguments, dirty))
    check_same_bits(before, after)


L0 = 64  # one block more than sinks and local blocks


def test_rows_within_l0_are_dense_beside_longer_ones():
    arguments = setting(GQA)
    step = sparse(arguments, attention_plan(GQA, l0=L0, rho=0.0))
    assert not step.chosen[0].whole
    difference = distance(step.verification.logits, run_dense(*arguments).logits)
    within = np.array(LENGTHS) <= L0
    assert difference[within].max() < TOLERANCE and difference[~within].min() > 10 * TOLERANCE
    assert step.chosen[0].num_blocks[:, 0].tolist() == [min(n, 4) for n in HELD]


@pytest.mark.parametrize("model", [GQA, WINDOWED], ids=["GQA", "windows"])
def test_a_batch_within_l0_takes_the_dense_path(model):
    """Bit for bit; finished rows may be longer, unfinished ones may not."""
    arguments = setting(model)
    dense, plan = run_dense(*arguments), attention_plan(model, l0=L0, rho=0.0)
    step = sparse(arguments, plan, live=np.array(LENGTHS) <= L0)
    assert step.chosen[0].whole
    assert step.verification.reads.kv_blocks is not None and dense.reads == StepReads()
    check_same_bits(dense, dataclasses.replace(step.verification, reads=StepReads()))
    step = sparse(arguments, plan)
    assert not step.chosen[0].whole
    assert distance(step.verification.logits, dense.logits).max() > TOLERANCE


def test_layers_without_selection_reuse_their_anchors():
    """SA*: the very set of the anchor before them."""
    arguments = setting(TINY)
    every, first = (attention_plan(TINY, keep=0.5, anchors=anchors) for anchors in (None, (0,)))
    chosen, alone = sparse(arguments, first).chosen, sparse(arguments, every).chosen
    for selection in chosen:
        jax.tree.map(np.testing.assert_array_equal, selection, alone[0])
    assert (np.asarray(alone[1].block_indices) != np.asarray(alone[0].block_indices)).any()


def test_a_pass_says_what_each_layer_read():
    """A chooser is asked layer by layer, with the layer's own cache and what was chosen before it."""
    target, params, cache, lengths, draft = setting(TINY)
    rows = len(LENGTHS)
    selection = Selection(np.zeros((rows, 2, 1), np.int32), np.ones((rows, 2), np.int32), None, 16)
    asked, results = [], []

    def choose(layer, q, cached, before):
        assert cached[0] is cache.keys[layer] and q.shape == (rows, 1, TINY.num_heads, TINY.head_dim)
        asked.append((layer, before))
        return None if layer == 0 else selection

    def run():
        mask = np.ones((rows, 1, 1), bool)
        tokens = draft.tokens[:, :1], lengths[:, None]
        results.append(forward(target, params, *tokens, cache, lengths, mask, Choices(choose)))

    jax.eval_shape(run)
    assert asked == [(0, ()), (1, (None,))]
    assert results[0].chosen == (None, selection)


def test_dense_layers_read_everything():
    """What lies in blocks that layer 0 does not read matters in layer 1, which reads all."""
    arguments = setting(TINY)
    target, params, cache, lengths, draft = arguments
    plan = attention_plan(TINY, keep=0.01, dense_layers=(1,))
    summaries = summaries_of(plan, TINY, cache, lengths)
    assert [layer is None for layer in summaries.layers] == [False, True]
    step = sparse(arguments, plan, summaries=summaries)
    assert [selection is None for selection in step.chosen] == [False, True]
    assert step.verification.reads.kv_blocks.tolist() == [2 * (min(n, 3) + n) for n in HELD]
    unread = np.arange(16, 32)  # block 1: read only where it is among the last two
    skipped = np.array(HELD) > 3

    def with_noise(layer):
        values = [np.array(x) for x in cache.values]
        values[layer][:, :, unread] = 9.0
        changed = (target, params, dataclasses.replace(cache, values=tuple(values)), lengths, draft)
        after = sparse(changed, plan, summaries=summaries)
        return distance(after.verification.logits, step.verification.logits)[skipped]

    assert with_noise(0).max() == 0 and with_noise(1).min() > TOLERANCE


def test_all_layers_dense_is_dense():
    arguments = setting(TINY)
    plan = attention_plan(TINY, keep=0.01, anchors=(), dense_layers=(0, 1))
    check_same_bits(run_dense(*arguments), sparse(arguments, plan).verification)
