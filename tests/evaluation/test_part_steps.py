"""The meter of experts and channels: what is dense has no drift, what is left out is counted."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from sv_jax.config import MoEConfig
from sv_jax.evaluation.cutting import Case
from sv_jax.evaluation.part_steps import PartSetting, measure_parts
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig
from sv_jax.sparsity.ffn_config import ChannelSparsity, ExpertSparsity
from tests.tiny import TINY, make_model, random_prompts, replace

K, TOP, E = 3, 3, 8  # a step has K + 1 tokens
MOE = MoEConfig(E, TOP, 16, norm_topk_prob=True, shared_expert_size=32)
CONFIG = replace(TINY, moe=MOE, num_layers=3, dense_ffn_layers=(1,))
MEASURED = 10  # not a multiple of T
ATTENTION = AttentionSparsity(keep=1.0, block_size=16)


def setting(name, *, attention=None, ffn=None, experts=None, control=""):
    return PartSetting(name, SparsityConfig(attention, ffn, experts), control)


EVERY = ExpertSparsity(shortlist=E)
HALF = ChannelSparsity("shared", keep=0.5)
SETTINGS = [
    setting("whole", attention=ATTENTION, ffn=ChannelSparsity("gate", [0.0]), experts=EVERY),
    setting("list", experts=ExpertSparsity(shortlist=3)),
    setting("random list", experts=ExpertSparsity(shortlist=3), control="random"),
    setting("smaller k", experts=ExpertSparsity(experts_per_token=2)),
    setting("budget", ffn=HALF),
    setting("random budget", ffn=HALF, control="random"),
    setting("static budget", ffn=HALF, control="static"),
    setting("oracle", ffn=HALF, control="oracle"),
]


@functools.cache
def measured():
    target, params = make_model(CONFIG)
    model = SimpleNamespace(target=target, params=params, max_model_len=256, sharding=target.sharding)
    (ids,) = random_prompts([60], seed=3)
    case = Case("c", "ordinary", "d", tuple(ids), MEASURED)
    votes = [np.arange(n, dtype=np.float32) for n in (32, 64, 32)]
    found = measure_parts(model, case, SETTINGS, num_speculative_tokens=K, static_votes=votes)
    return {m.setting: m for m in found}


def test_what_is_whole_does_not_drift():
    whole = measured()["whole"]
    assert whole.positions == whole.agreeing == MEASURED and whole.steps == 3
    assert abs(whole.kl) < 1e-4 and whole.nll == pytest.approx(whole.dense_nll, rel=1e-5)
    assert whole.experts[0] == whole.experts[1] and whole.experts[2] == whole.experts[3] == 2 * TOP * 12
    assert whole.channels[0] == whole.channels[1] and whole.channels[2] == whole.channels[3]
    assert whole.weight_channels == whole.dense_weight_channels
    # Steps of 4 tokens in layers of 64 channels, and of 32 in two shared experts; experts of 16.
    assert whole.dense_weight_channels == 3 * (3 * (64 + 32 + 32) + 16 * whole.experts[1])


def test_what_is_left_out_shows_and_is_counted():
    found = measured()
    for name in ("list", "random list", "smaller k", "budget", "random budget"):
        m = found[name]
        assert m.positions == MEASURED and m.kl > 1e-4 and np.isfinite(m.nll), name
        assert m.dense_nll == pytest.approx(found["whole"].dense_nll)
    for name in ("list", "random list"):
        read, wanted, kept, pairs = found[name].experts
        assert read == 3 * 2 * 3 < wanted and kept < pairs == 2 * TOP * 12
    assert found["smaller k"].experts[2] == 2 * 2 * 12 and found["smaller k"].channels is None
    for name in ("budget", "random budget", "static budget", "oracle"):
        used, most, wanted, held = found[name].channels
        assert used * 2 == most and wanted * 2 == held and found[name].experts[0] == found[name].experts[1]
    assert found["budget"].weight_channels < found["budget"].dense_weight_channels


def test_controls_choose_otherwise():
    found = measured()
    assert found["random list"].kl != found["list"].kl
    assert len({found[f"{name}budget"].kl for name in ("", "random ", "static ")} | {found["oracle"].kl}) == 4
