"""Plans: which layer reads whose set, and the static number of blocks that programs are made for."""

import re

import jax
import numpy as np
import pytest

from sv_jax.config import UserError
from sv_jax.sparsity.config import BLOCK_SIZES, AttentionSparsity
from sv_jax.sparsity.plan import resolve_anchors
from tests.sparsity.plain_selection import plain_blocks, plain_tokens
from tests.tiny import TINY, attention_plan, replace

FULL = replace(TINY, num_layers=6)
MIXED = replace(FULL, sliding_windows=(None, 32, 32, None, 64, 32))


@pytest.mark.parametrize(
    ("model", "anchors", "dense", "expected"),
    [
        (FULL, None, (), (0, 1, 2, 3, 4, 5)),
        (FULL, (0,), (), (0, 0, 0, 0, 0, 0)),
        (FULL, (3, 0), (), (0, 0, 0, 3, 3, 3)),
        (FULL, None, (0, 4), (None, 1, 2, 3, None, 5)),
        (FULL, (1, 4), (0, 2), (None, 1, None, 1, 4, 4)),
        (FULL, (), range(6), (None,) * 6),
        (MIXED, None, (), (0, 1, 2, 3, 4, 5)),
        # Layer 3 skips the anchors 1 and 4, which see other positions than it does.
        (MIXED, (0, 1, 4), (), (0, 1, 1, 0, 4, 1)),
        (MIXED, (0, 2), (1, 4), (0, None, 2, 0, None, 2)),
    ],
)
def test_anchors(model, anchors, dense, expected):
    assert resolve_anchors(AttentionSparsity(anchors=anchors, dense_layers=tuple(dense)), model) == expected
    plan = attention_plan(model, anchors=anchors, dense_layers=tuple(dense)).attention
    assert plan.anchors == tuple(i for i, anchor in enumerate(expected) if anchor == i)
    for layer, anchor in enumerate(expected):
        if anchor is not None:
            assert anchor <= layer and model.sliding_window(anchor) == model.sliding_window(layer)


@pytest.mark.parametrize(
    ("model", "anchors", "dense", "message"),
    [
        (FULL, (0, 6), (), "anchors has layer 6; allowed for this model: 0 to 5"),
        (FULL, None, (9,), "dense-layers has layer 9; allowed for this model: 0 to 5"),
        (FULL, (0, 2), (2,), "layer 2 is in anchors and in dense-layers; allowed: one of the two"),
        (FULL, (1,), (), "layer 0 has no anchor before it; allowed: 0 among the anchors, or among dense-lay"),
        (FULL, (), (), "layer 0 has no anchor before it"),
        (
            MIXED,
            (0, 1),
            (),
            "layer 4 has no anchor before it with its window of 64; allowed: 4 among the anc",
        ),
        (MIXED, (0, 4), (), "layer 1 has no anchor before it with its window of 32"),
    ],
)
def test_anchors_refused(model, anchors, dense, message):
    with pytest.raises(UserError, match=re.escape(message)):
        resolve_anchors(AttentionSparsity(anchors=anchors, dense_layers=dense), model)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(
    "rules",
    [
        {"keep": 0.1},
        {"keep": 1.0},
        {"keep": 0.3, "l0": 300},
        {},
        {"l0": 0, "rho": 0.0},
        {"l0": 500, "rho": 0.7, "sink_blocks": 3, "local_blocks": 7},
    ],
)
def test_the_static_number_of_blocks_holds_every_budget(rules, block_size):
    """N for a bucket: what the longest row in it may read, at least sink and local blocks, at most all."""
    plan = attention_plan(block_size=block_size, **rules).attention
    for capacity in (block_size, 512, 1024, 8192):
        most = plan.most_blocks(capacity)
        total = capacity // block_size
        least = min(plan.sink_blocks + plan.local_blocks, total)
        assert least <= most <= total
        lengths = [*range(0, capacity, 97), capacity - 1, capacity]
        tokens = [plain_tokens(n, plan.most_l0, str(plan.most_rho)) for n in lengths]
        budgets = [max(plain_blocks(n, block_size), least) for n in tokens]
        assert most == min(max(budgets), total)


def test_budgets_of_a_plan():
    """keep stands for rho with l0 = 0; without any of the three, the paper's."""
    for rules, expected in [
        ({}, (4096, 0.1)),
        ({"keep": 0.25}, (0, 0.25)),
        ({"keep": 0.25, "l0": 512}, (512, 0.25)),
        ({"l0": 1024}, (1024, 0.1)),
        ({"rho": 0.5}, (4096, 0.5)),
    ]:
        plan = attention_plan(**rules).attention
        assert (plan.most_l0, plan.most_rho) == (int(plan.l0), expected[1]) == expected
        assert plan.rho == np.float32(expected[1])


def test_other_budgets_are_the_same_program():
    """Budgets are the plan's only arrays; above those that it was made with there is no room."""
    plan = attention_plan(l0=512, rho=0.25).attention
    changed = plan.with_budget(0, 0.125)
    assert (int(changed.l0), float(changed.rho)) == (0, 0.125)
    assert jax.tree.structure(changed) == jax.tree.structure(plan)
    assert [leaf.aval for leaf in jax.tree.leaves(changed)] == [leaf.aval for leaf in jax.tree.leaves(plan)]
    for l0, rho in [(513, 0.25), (512, 0.26), (-1, 0.1), (0, -0.1)]:
        with pytest.raises(UserError, match=r"allowed without new programs: l0 up to 512, rho up to 0.25"):
            plan.with_budget(l0, rho)
