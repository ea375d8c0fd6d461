"""Verification that leaves experts and channels out: what a step computes and counts."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.config import MoEConfig
from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.engine.ffn_reads import count_ffn_reads
from sv_jax.engine.trace import RowTrace
from sv_jax.model.choices import DENSE
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig
from sv_jax.sparsity.ffn_config import ChannelSparsity, ExpertSparsity
from sv_jax.sparsity.plan import make_plan
from sv_jax.sparsity.step import make_choices
from sv_jax.speculation.tree import existing_nodes
from sv_jax.speculation.types import Draft, StepReads
from sv_jax.speculation.verify import verify
from tests.speculation.test_jit import COMPILING, count_compilations
from tests.tiny import TINY, decode, make_model, prefilled, random_prompts, replace, run_to_end

E, K = 8, 3
MOE = MoEConfig(E, K, 16, norm_topk_prob=True, shared_expert_size=32)
CONFIG = replace(TINY, family="qwen2_moe", moe=MOE, num_layers=3, dense_ffn_layers=(0,))
PROMPTS, NEW = random_prompts((5, 20, 33, 1)), 16
SKIP = ExpertSparsity(max_skipped=2, betas=[[0.5, 0.8]] * 2)


def plan_of(attention=None, ffn=None, experts=None, config=CONFIG):
    return make_plan(SparsityConfig(attention, ffn, experts), config)


NO_BETAS = ExpertSparsity(max_skipped=2, betas=[[0.0, 0.0]] * 2)
WHOLE = {
    "rules of each token": plan_of(None, ChannelSparsity("product", thresholds=[0.0]), NO_BETAS),
    "shared sets": plan_of(
        AttentionSparsity(keep=1.0, block_size=16),
        ChannelSparsity("shared", keep=1.0),
        ExpertSparsity(shortlist=E, outside="repick"),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_where_nothing_is_left_out_the_text_is_plain_decoding_s(name):
    expected, _ = decode(*make_model(CONFIG), NoDraft(), PROMPTS, new_tokens=NEW)
    for mesh in [(1, 1), (2, 2)] if name == "shared sets" else [(1, 1)]:
        model = make_model(CONFIG, mesh)
        got, state = decode(*model, PromptLookup(4), PROMPTS, new_tokens=NEW, sparsity=WHOLE[name])
        assert got == expected
        counts = count(state, WHOLE[name], mesh[1])
        assert counts.sparse_steps == 0 < counts.steps and counts.weight_bytes == counts.dense_weight_bytes
        assert counts.experts.read == counts.experts.wanted > 0


def count(state, plan, shards=1):
    whole = RowTrace.read(state.trace)
    starts, ends = np.asarray(state.prompt_lengths), np.asarray(state.lengths) + 1
    rows = [whole[i, start:end] for i, (start, end) in enumerate(zip(starts, ends))]
    return count_ffn_reads(rows, plan, CONFIG, "float32", shards)


@partial(jax.jit, static_argnames=("target",))
def run(target, params, cache, lengths, draft, plan=None):
    choices = DENSE
    if plan is not None:
        rows = lengths, existing_nodes(draft.parents), lengths > 0
        choices = make_choices(plan, None, *rows, sharding=target.sharding)
    return verify(target, params, cache, lengths, draft, choices)


def setting(config=CONFIG):
    """A step's arguments: two drafted tokens, and empty slots in row 0."""
    model = make_model(config)
    state = prefilled(*make_model(CONFIG), PROMPTS, limits=[60] * 4)
    parents = jnp.array([[-1, 0, -1], [-1, 0, 1], [-1, 0, 0], [-1, 0, 1]])
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 3)), jnp.int32)
    return *model, state.cache, state.lengths, Draft(tokens, parents)


def test_a_smaller_k_is_the_model_with_a_smaller_k():
    """Independent of the code that leaves experts out: the same weights under another config."""
    smaller = replace(CONFIG, moe=dataclasses.replace(MOE, num_experts_per_tok=2))
    target, params, *rest = setting()
    got = run(target, params, *rest, plan_of(experts=ExpertSparsity(experts_per_token=2)))
    expected = run(make_model(smaller)[0], params, *rest)
    np.testing.assert_allclose(got.logits, expected.logits, atol=1e-5)
    assert abs(np.asarray(got.logits - run(target, params, *rest).logits)).max() > 1e-3
    # Eleven nodes, in two layers with experts.
    assert int(got.reads.experts.kept) == 2 * 2 * 11 and int(got.reads.experts.pairs) == 2 * 3 * 11
    assert expected.reads == StepReads()


def test_a_step_s_counts():
    arguments = setting()
    channels = run(*arguments, plan_of(None, ChannelSparsity("shared", keep=0.5, dense_layers=(1,)))).reads
    # Layer 0 has 64 channels; the shared expert of layer 2 has 32, its routed ones 16 each.
    assert channels.channels.held >= 64 + 32 and channels.channels.most_used >= 11 * (64 + 32)
    assert channels.experts.read == channels.experts.wanted
    assert channels.channels.wanted * 2 == channels.channels.held
    assert channels.channels.used * 2 == channels.channels.most_used
    masked = run(*arguments, plan_of(None, ChannelSparsity("gate", [0.4]))).reads.channels
    assert 0 < masked.used < masked.wanted / masked.held * masked.most_used < masked.most_used
    listed = run(*arguments, plan_of(experts=ExpertSparsity(shortlist=4))).reads.experts
    assert listed.read == 2 * 4 < listed.wanted and listed.kept < listed.pairs
    skipped = run(*arguments, plan_of(experts=SKIP)).reads.experts
    assert skipped.kept < skipped.pairs == 2 * K * 11


def test_bytes_of_a_run():
    """By hand: every step's networks, and the experts that its trace says."""
    ffn = ChannelSparsity("shared", keep=0.25, dense_layers=(2,))
    plan = plan_of(None, ffn, ExpertSparsity(shortlist=4))
    _, state = decode(*make_model(CONFIG), PromptLookup(4), PROMPTS, new_tokens=NEW, sparsity=plan)
    counts = count(state, plan)
    assert counts.steps == int(state.steps) and counts.sparse_steps == counts.steps
    assert counts.tokens == sum(len(p) + NEW for p in PROMPTS) - sum(len(p) + 1 for p in PROMPTS)
    row = 32 * 4  # bytes of a channel's vector
    networks = (64 + 2 * 16) + (32 + 2 * 8) + 3 * 32  # layers 0, 1 and 2: the last leaves nothing out
    routed = expert_channels(counts)
    assert counts.weight_bytes == row * (networks * counts.steps + routed)
    assert counts.dense_weight_bytes == row * (3 * (64 + 32 + 32) * counts.steps + 48 * counts.experts.wanted)
    assert counts.experts.read <= 4 * 2 * counts.steps
    doubled = counts + counts
    assert doubled.experts.read == 2 * counts.experts.read and doubled.weight_bytes == 2 * counts.weight_bytes


def expert_channels(counts):
    return 3 * 16 * counts.experts.read


def test_nothing_recompiles_when_thresholds_or_numbers_change():
    def sparsity(threshold, m, size):
        skip = ExpertSparsity(max_skipped=m, betas=[[threshold, 0.5]] * 2, shortlist=size)
        return plan_of(None, ChannelSparsity("product", [threshold]), skip)

    def decoded(seed, plan):
        model, prompts = make_model(CONFIG), random_prompts((9, 4), seed=seed)
        state = prefilled(*model, prompts, limits=[30, 20], sparsity=plan)
        state = run_to_end(*model, PromptLookup(4), state, max_steps=20, sparsity=plan)
        return np.asarray(state.trace.experts.kept).sum() / np.asarray(state.trace.experts.pairs).sum()

    decoded(0, sparsity(0.1, 2, 5))
    events: list[str] = []
    listener = partial(count_compilations, events)
    jax.monitoring.register_event_duration_secs_listener(listener)
    kept = {decoded(seed, plan) for seed, plan in enumerate([sparsity(0.3, 1, 5), sparsity(0.0, 2, 2)], 1)}
    assert events == [] and len(kept) == 2
    jax.jit(lambda x: x * 7 + len(kept))(jnp.ones(3))
    assert set(events) == set(COMPILING)  # the listener does hear
    jax.monitoring.unregister_event_duration_listener(listener)


def test_what_is_left_of_a_plan_in_a_small_cache():
    attention = AttentionSparsity(l0=512, rho=0.1)
    alone, both = plan_of(attention), plan_of(attention, None, SKIP)
    assert alone.within(512) is None and alone.within(513) is alone
    assert both.within(512).attention is None and both.within(512).experts is both.experts
    assert both.within(513) is both
