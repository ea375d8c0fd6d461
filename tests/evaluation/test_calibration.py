"""What reuse costs: Jaccard by hand, traced sources against static anchors, sums against the drift meter."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.config import UserError
from sv_jax.evaluation.anchors import allowed_pairs
from sv_jax.evaluation.calibration import (
    DENSE,
    jaccard,
    own_source,
    pair_source,
    run_step,
    selecting_plan,
    shared_pass,
    sources_of,
    step_numbers,
    sweep,
    total,
)
from sv_jax.evaluation.calibration_run import CalibrationSettings, calibrate
from sv_jax.evaluation.drift import DriftSetting, measure
from sv_jax.evaluation.store import Store
from sv_jax.evaluation.texts import Case
from sv_jax.evaluation.true_steps import chain, true_steps
from sv_jax.model.choices import Choices
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig
from sv_jax.sparsity.plan import make_plan
from sv_jax.sparsity.selection import make_chooser, summary_scorer
from sv_jax.sparsity.summaries import STATISTICS
from sv_jax.speculation.verify import verify
from tests import tiny

LAYERS, K = 4, 3
ATTENTION = AttentionSparsity(keep=0.3, block_size=16, sink_blocks=1, local_blocks=1, score="mean")
OWN = np.arange(LAYERS, dtype=np.int32)
WINDOWS = {"full attention": (), "windows": (None, 100, None, 100)}


@functools.cache
def make_model(windows=(), mesh=(1, 1), sharpest=None) -> SimpleNamespace:
    """What is asked of a LanguageModel here. Queries so large that it matters which blocks are read.

    sharpest: a layer in which it matters more than in all others.
    """
    config = tiny.replace(tiny.TINY, num_layers=LAYERS, sliding_windows=windows)
    target, params = tiny.make_model(config, mesh)

    def sharpen(path, leaf):
        name = jax.tree_util.keystr(path)
        if "query" not in name:
            return leaf
        return leaf * (12 if sharpest is None or f"layers_{sharpest}'" in name else 3)

    params = jax.tree_util.tree_map_with_path(sharpen, params)
    return SimpleNamespace(
        name="tiny",
        target=target,
        params=params,
        sharding=target.sharding,
        max_model_len=256,
        dtype="float32",
        checkpoint=SimpleNamespace(sha256="0" * 64),
    )


def make_cases(count: int, *, length: int = 150, measured: int = 10) -> list[Case]:
    prompts = tiny.random_prompts([length] * count, seed=3)
    return [Case(f"case-{i}", "copy", f"d{i}", tuple(ids), measured) for i, ids in enumerate(prompts)]


def first_step(model, attention=ATTENTION, rows: int = 2):
    return next(
        true_steps(
            model,
            make_cases(rows),
            num_speculative_tokens=K,
            block_sizes=(attention.block_size,),
            statistics=STATISTICS[attention.score],
        )
    )


@partial(jax.jit, static_argnames=("target",))
def static_logits(target, params, step, plan):
    """Sparse verification by a plan with static anchors."""
    score = summary_scorer(plan, step.summaries[plan.block_size], step.lengths, step.nodes)
    choose = make_chooser(plan, score, step.lengths, step.lengths > 0, sharding=target.sharding)
    return verify(target, params, step.cache, step.lengths, chain(step.tokens), Choices(choose)).logits


def law_of(logits) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits)), np.float64)


@pytest.mark.parametrize("windows, score", [((), "mean"), ((), "mass"), (WINDOWS["windows"], "mean")])
def test_traced_sources_read_what_static_layers_read(windows, score):
    model, attention = make_model(windows), dataclasses.replace(ATTENTION, score=score)
    step = first_step(model, attention)
    plan = selecting_plan(attention, model.target.config)
    reference = np.random.default_rng(0).normal(size=step.dense.logits.shape).astype(np.float32)
    laws = []
    choices = [((0, 1), ()), ((0, 1, 2, 3), ()), ((0, 1), (2,)), ((2, 3), (0, 1))]
    for anchors, dense in [*choices, *([] if windows else [((0, 2), ()), ((1,), (0, 3))])]:
        model_config = model.target.config
        chosen = dataclasses.replace(attention, anchors=anchors, dense_layers=dense)
        static = make_plan(SparsityConfig(chosen), model_config)
        law = law_of(static_logits(model.target, model.params, step, static.attention))
        laws.append(law)
        passed = shared_pass(
            model.target,
            model.params,
            step.cache,
            step.summaries[16],
            step.lengths,
            step.tokens,
            step.nodes,
            reference,
            plan,
            sources_of(anchors, chosen, model_config),
        )
        expected = law_of(reference)
        kl = np.sum(np.exp(expected) * (expected - law), axis=-1)
        assert np.asarray(passed.kl) == pytest.approx(kl, abs=2e-5), chosen
        assert (np.asarray(passed.agreeing) == (law.argmax(-1) == reference.argmax(-1))).all()
    for i, law in enumerate(laws):  # and it shows which anchors they are
        assert all(abs(law - other).max() > 1e-2 for other in laws[:i])


def test_one_program_for_every_source():
    model, step = make_model(), first_step(make_model())
    plan = selecting_plan(ATTENTION, model.target.config)
    run_step(model, step, plan, OWN, 2)
    compiled = shared_pass._cache_size()
    figures = [run_step(model, step, plan, pair_source(pair, LAYERS), 2)[0] for pair in [(0, 1), (1, 3)]]
    assert shared_pass._cache_size() == compiled and figures[0] != figures[1]


def test_only_one_layer_reads_anothers_set():
    assert pair_source((1, 3), 5).tolist() == [0, 1, 2, 1, 4]
    assert pair_source((1, 3), 5, dense=(0, 4)).tolist() == [DENSE, 1, 2, 1, DENSE]
    assert own_source(3, (1,)).tolist() == [0, DENSE, 2] and own_source(2).tolist() == [0, 1]


def test_own_sets_do_not_depend_on_what_later_layers_read():
    model, step = make_model(), first_step(make_model())
    plan = selecting_plan(ATTENTION, model.target.config)
    own = run_step(model, step, plan, OWN, 2)[2]
    mixed = run_step(model, step, plan, pair_source((0, 2), LAYERS), 2)[2]
    assert (np.asarray(own.block_indices)[:3] == np.asarray(mixed.block_indices)[:3]).all()


def test_jaccard_by_hand():
    pad = 99  # entries behind the count may be anything
    # [L = 3, B = 1, K = 2, N = 3]
    indices = np.array([[[[0, 1, 2], [0, 1, 5]]], [[[0, 1, 3], [2, 3, 4]]], [[[0, pad, pad], [0, 1, 5]]]])
    counts = np.array([[[3, 3]], [[3, 3]], [[1, 3]]])
    found = jaccard(indices, counts, [(0, 1), (0, 2), (1, 2)])
    # (0, 1): 2 of 4 and 0 of 6; (0, 2): 1 of 3 and all; (1, 2): 1 of 3 and 0 of 6.
    assert found == pytest.approx([(2 / 4 + 0) / 2, (1 / 3 + 1) / 2, (1 / 3 + 0) / 2])
    assert jaccard(indices, 0 * counts, [(0, 1)]).tolist() == [1.0]
    assert jaccard(indices, counts, []).shape == (0,)


def test_jaccard_against_sets():
    rng = np.random.default_rng(0)
    indices = np.array([[[rng.permutation(9)[:6] for _ in range(2)] for _ in range(3)] for _ in range(4)])
    counts = rng.integers(1, 7, (4, 3, 2))

    def sets(layer):
        return [set(indices[layer, b, k, : counts[layer, b, k]]) for b in range(3) for k in range(2)]

    pairs = allowed_pairs(dict.fromkeys(range(4)), 3)
    expected = [np.mean([len(x & y) / len(x | y) for x, y in zip(sets(a), sets(b))]) for a, b in pairs]
    assert jaccard(indices, counts, pairs) == pytest.approx(expected)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_sums_are_the_drift_meters(windows):
    """Three cases in batches of two, and a last step of which two of four positions count."""
    model, cases = make_model(windows), make_cases(3)
    config = model.target.config
    anchors = (0, 1, 3)
    sources = [OWN, sources_of(anchors, ATTENTION, config)]
    figures = list(
        sweep(
            model,
            cases,
            selecting_plan(ATTENTION, config),
            sources,
            num_speculative_tokens=K,
            batch_size=2,
        )
    )
    assert [(f.batch, f.step, f.rows, f.positions) for f in figures] == [
        *[(0, 0, 2, 8), (0, 1, 2, 8), (0, 2, 2, 4)],
        *[(1, 0, 1, 4), (1, 1, 1, 4), (1, 2, 1, 2)],
    ]
    assert [(f.batch, f.step) for f in figures] == step_numbers(cases, K, 2)
    totals = total(figures)
    settings = [DriftSetting("mean", dataclasses.replace(ATTENTION, anchors=a)) for a in (None, anchors)]
    batches = [list(measure(model, x, settings, num_speculative_tokens=K)) for x in (cases[:2], cases[2:])]
    measured = [[m for batch in batches for m in batch[i]] for i in range(2)]  # by setting
    assert totals.positions == 30
    assert totals.kl == pytest.approx([sum(m.kl for m in x) / 30 for x in measured], abs=1e-6)
    assert totals.agreement == pytest.approx([sum(m.agreeing for m in x) / 30 for x in measured])
    assert abs(totals.kl[0] - totals.kl[1]) > 1e-4


SETTINGS = CalibrationSettings(
    attention=ATTENTION,
    method="damage",
    num_speculative_tokens=K,
    reach=2,
    max_anchors=None,
    tolerance=0.0,
    batch_size=2,
    max_dense_layers=0,
    dense_gain=0.2,
)


def run(tmp_path, name="store", **changes):
    """A calibration with the store `name`; `stop_after` asks whether to stop before it does."""
    stop_after = changes.pop("stop_after", None)
    model, cases = changes.pop("model", make_model()), changes.pop("cases", make_cases(3))
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return stop_after is not None and asked > stop_after

    settings = dataclasses.replace(SETTINGS, **changes)
    store = Store(tmp_path / f"{name}.jsonl")
    return calibrate(model, cases, settings, store, progress=False, should_stop=should_stop), asked


def test_damage_is_what_one_reuse_adds(tmp_path):
    found, _ = run(tmp_path)
    assert found.positions == 30 and found.every_layer.anchors == (0, 1, 2, 3)
    assert len(found.chosen.anchors) == len(found.even.anchors) <= 2
    config, cases = make_model().target.config, make_cases(3)
    for layer, source in enumerate(found.sources):
        if source == layer:
            assert found.damage[layer] is None and found.jaccard[layer] is None
            continue
        sources = [OWN, pair_source((source, layer), LAYERS)]
        plan = selecting_plan(ATTENTION, config)
        totals = total(
            sweep(
                make_model(),
                cases,
                plan,
                sources,
                pairs=[(source, layer)],
                num_speculative_tokens=K,
                batch_size=2,
            )
        )
        assert found.damage[layer] == pytest.approx(totals.kl[1] - totals.kl[0], abs=1e-9)
        assert found.jaccard[layer] == pytest.approx(totals.jaccard[0])
        assert found.every_layer.kl == pytest.approx(totals.kl[0])
    paid = sum(max(damage, 0) for damage in found.damage if damage is not None)
    assert (
        found.chosen_cost == pytest.approx(paid)
        and found.chosen_cost == found.predicted[len(found.chosen.anchors)]
    )


def test_jaccard_needs_one_sparse_pass_a_step(tmp_path):
    found, asked = run(tmp_path, method="jaccard")
    damage, damage_asked = run(tmp_path, "other")
    steps, pairs = 6, 5
    assert damage_asked - asked == steps * pairs
    assert set(found.damage) == {None}
    assert found.chosen_cost == pytest.approx(sum(1 - j for j in found.jaccard if j is not None))
    assert found.every_layer == damage.every_layer


def test_the_tolerance(tmp_path):
    assert run(tmp_path, tolerance=100.0, reach=3)[0].chosen.anchors == (0,)
    strict = run(tmp_path, tolerance=0.0, max_anchors=4)[0]
    assert strict.chosen_cost == 0
    similar = run(tmp_path, method="jaccard", tolerance=1.0, max_anchors=4)[0]
    assert similar.chosen.anchors == (0, 1, 2, 3) and similar.chosen == similar.every_layer


def kl_with_dense(model, dense, cases) -> float:
    """The drift meter's, in which `dense` is part of the program."""
    setting = DriftSetting("mean", dataclasses.replace(ATTENTION, dense_layers=dense))
    batches = [list(measure(model, x, [setting], num_speculative_tokens=K)) for x in cases]
    measured = [m for batch in batches for m in batch[0]]
    return sum(m.kl for m in measured) / sum(m.positions for m in measured)


def test_dense_layers_are_those_that_take_away_most(tmp_path):
    model, cases = make_model(sharpest=0), make_cases(3)
    batches = (cases[:2], cases[2:])
    dense: tuple[int, ...] = ()
    kls, shares = [kl_with_dense(model, (), batches)], []
    for _ in range(3):
        others = [layer for layer in range(LAYERS) if layer not in dense]
        one_more = {layer: kl_with_dense(model, (*dense, layer), batches) for layer in others}
        dense = (*dense, min(one_more, key=one_more.__getitem__))
        kls.append(one_more[dense[-1]])
        shares.append(1 - kls[-1] / kls[-2])
    ends = set()
    for gain in [0.0, 1.0, *(share + shift for share in shares for shift in (-1e-3, 1e-3))]:
        number = next((i for i, share in enumerate(shares) if share < gain), 3)
        found, _ = run(tmp_path, model=model, max_dense_layers=3, dense_gain=max(gain, 0.0), max_anchors=4)
        assert found.dense_layers == dense[:number], gain
        assert found.every_layer.kl == pytest.approx(kls[0], abs=1e-6)
        assert found.selecting.kl == pytest.approx(kls[number], abs=1e-6)
        assert found.selecting.anchors == tuple(x for x in range(LAYERS) if x not in dense[:number])
        assert [x for x, s in enumerate(found.sources) if s == DENSE] == sorted(dense[:number])
        assert not set(found.chosen.anchors) & set(dense[:number])
        ends.add(number)
    assert dense[0] == 0 and len(ends) > 2  # the threshold was seen to decide


def test_a_dense_layer_that_would_take_too_many_anchors_is_none(tmp_path):
    """With reach 1 and two anchors of four layers, layer 1 or 2 dense would leave three single ones."""
    found, _ = run(tmp_path, max_dense_layers=3, dense_gain=0.0, reach=1)
    assert len(found.chosen.anchors) <= 2
    assert found.dense_layers and found.dense_layers[0] in (0, 3)


def test_layers_with_other_windows_share_nothing(tmp_path):
    found, _ = run(tmp_path, model=make_model(WINDOWS["windows"]))
    assert found.sources == (0, 1, 0, 1) and found.chosen.anchors == (0, 1)


@pytest.mark.parametrize("stop_after", [0, 5, 20, 47, 60])
def test_an_interrupted_run_goes_on(tmp_path, stop_after):
    """In the prefill, between the passes of a step, between steps, and while the choice is verified."""
    whole, asked = run(tmp_path)
    interrupted, _ = run(tmp_path, "cut", stop_after=stop_after)
    resumed, again = run(tmp_path, "cut")
    assert interrupted is None and resumed == whole
    assert again < asked or stop_after < 20
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "store.jsonl").read_bytes()
    assert run(tmp_path, "cut") == (whole, 0)


def test_figures_of_other_settings_do_not_count(tmp_path):
    _, asked = run(tmp_path)
    for changes in ({"reach": 1}, {"num_speculative_tokens": 1}, {"cases": make_cases(3, length=151)}):
        assert run(tmp_path, **changes)[1] > 20, changes
    assert run(tmp_path, max_anchors=3, tolerance=1e-6)[1] < asked / 2  # only what is chosen is another


def test_on_a_mesh(tmp_path):
    alone, _ = run(tmp_path, cases=make_cases(2))
    sharded, _ = run(tmp_path, "mesh", cases=make_cases(2), model=make_model((), (2, 2)))
    assert sharded.chosen.anchors == alone.chosen.anchors
    assert sharded.chosen.kl == pytest.approx(alone.chosen.kl, abs=1e-4)
    assert sharded.jaccard == pytest.approx(alone.jaccard)


def test_layers_that_do_not_fit(tmp_path):
    with pytest.raises(
        UserError, match="max-dense-layers 4; allowed for the 4 layers of this model: up to 3"
    ):
        run(tmp_path, max_dense_layers=4)
    with pytest.raises(
        UserError, match="max-anchors 1 with reach 2; allowed for the 4 layers of this model: at least 2"
    ):
        run(tmp_path, max_anchors=1)
