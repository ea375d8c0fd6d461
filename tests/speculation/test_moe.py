"""Mixture-of-experts models: speculative greedy decoding is plain greedy decoding, whatever the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.config import MoEConfig
from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.model.transformer import forward
from sv_jax.speculation.tree import existing_nodes
from sv_jax.speculation.types import Draft
from sv_jax.speculation.verify import verify
from tests.tiny import (
    TINY,
    attention_plan,
    decode,
    make_model,
    prefilled,
    random_prompts,
    replace,
    row_counts,
)

NEW = 16
PROMPTS = random_prompts((5, 20, 33, 1))
FAMILIES = {
    "mixtral": {"moe": MoEConfig(4, 2, 24, norm_topk_prob=True)},
    "qwen2_moe": {"moe": MoEConfig(8, 3, 16, False, shared_expert_size=32), "dense_ffn_layers": (0,)},
    "qwen3_moe": {"moe": MoEConfig(8, 2, 16, norm_topk_prob=True), "qk_norm": "head"},
    "olmoe": {"moe": MoEConfig(8, 4, 16, norm_topk_prob=False), "qk_norm": "projection"},
}
CONFIGS = {name: replace(TINY, family=name, **changes) for name, changes in FAMILIES.items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_same_tokens_on_every_mesh(family):
    config, accepted = CONFIGS[family], 0
    expected, _ = decode(*make_model(config), NoDraft(), PROMPTS, new_tokens=NEW)
    alone, _ = decode(*make_model(config), PromptLookup(4), PROMPTS[:1], new_tokens=NEW)
    assert alone == expected[:1]
    meshes = [(1, 1), (1, 2), (4, 2)] if family == "qwen2_moe" else [(1, 2)]  # others: for time's sake
    for mesh in meshes:
        got, state = decode(*make_model(config, mesh), PromptLookup(4), PROMPTS, new_tokens=NEW)
        assert got == expected, mesh
        accepted += sum(row.accepted for row in row_counts(state, 5))
    assert accepted > 0


def test_sparse_attention_that_keeps_everything():
    config = CONFIGS["qwen2_moe"]
    expected, _ = decode(*make_model(config), NoDraft(), PROMPTS, new_tokens=NEW)
    plan = attention_plan(config, keep=1.0)
    got, _ = decode(*make_model(config), PromptLookup(4), PROMPTS, new_tokens=NEW, sparsity=plan)
    assert got == expected


def test_empty_slots_and_finished_rows_route_nowhere(monkeypatch):
    """Their tokens reach no expert: whatever they are, the other rows' logits are the same bits."""
    from sv_jax.model import moe

    target, params = make_model(CONFIGS["olmoe"])
    state = prefilled(target, params, PROMPTS, limits=[60] * 4)
    parents = jnp.array([[-1, 0, 1], [-1, 0, -1], [-1, -1, -1], [-1, 0, 1]])
    finished = jnp.array([False, False, False, True])
    routed = []
    original = moe.route

    def watch(probabilities, config, live):
        routed.append(live)
        return original(probabilities, config, live)

    monkeypatch.setattr(moe, "route", watch)
    results = []
    for token in (1, 2):
        tokens = jnp.where(existing_nodes(parents) & ~finished[:, None], 7, token)
        draft = Draft(tokens, parents)
        results.append(verify(target, params, state.cache, state.lengths, draft, finished=finished).logits)
    live = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
    assert all((np.asarray(x) == live).all() for x in routed) and len(routed) == 4
    first, second = (np.asarray(x) for x in results)
    np.testing.assert_array_equal(first[live], second[live])


def test_prefill_routes_prompts_alone(monkeypatch):
    """What stands behind a prompt in its chunk is no token."""
    from sv_jax.speculation import prefill

    seen = []

    def watch(*arguments, live, **options):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), live)
        return forward(*arguments, live=live, **options)

    monkeypatch.setattr(prefill, "forward", watch)
    config = replace(CONFIGS["olmoe"], rms_norm_eps=2e-6)  # a program of its own
    prefilled(*make_model(config), PROMPTS, limits=[60] * 4)
    jax.effects_barrier()
    assert sum(live.sum(axis=1) for live in seen).tolist() == [len(p) for p in PROMPTS]
