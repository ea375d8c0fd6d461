"""The law of what speculative sampling emits is the law of plain sampling: chi-square over 200,000 draws.

The target is a table: its logits depend on the last two tokens, so that every node of a tree has a law of its
own. Drafts come from another table. Each row emits its first tokens through as many steps as that takes, with
the real `accept`, row keys and position keys; what is tested is the joint law of these tokens.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.sampling_params import SamplingParams
from sv_jax.speculation.accept import accept, residual_law
from sv_jax.speculation.commit import append_tokens
from sv_jax.speculation.request import make_request
from sv_jax.speculation.sampling import Purpose, position_keys, row_keys, warp
from sv_jax.speculation.types import Draft
from tests.speculation.plain_law import chi_square_p, plain_law

V, DRAWS, EMITTED = 8, 200_000, 3
PARAMS = SamplingParams(temperature=0.7, top_k=3, top_p=0.9)
PASSES, FAILS = 1e-4, 1e-10
TARGET, DRAFT = (np.random.default_rng(seed).normal(0, 1.2, (V, V, V)).astype(np.float32) for seed in (0, 1))


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Draws a tree of `parents` from a table, node by node.

    law: "full" as it is, "warped" with the filters of the target, None: no draws, but the most likely tokens.
    apart: siblings without replacement (always so where nothing is drawn).
    claimed: the law that it says it draws from, where that is another one.
    own: takes the target's table.
    """

    parents: tuple[int, ...]
    law: str | None = "full"
    apart: bool = False
    claimed: str | None = None
    own: bool = False

    def laws(self, name, context, sampling):
        logits = jnp.asarray(TARGET if self.own else DRAFT)[context]
        if name == "warped":
            logits = warp(logits[:, None], sampling)[:, 0]
        return jax.nn.softmax(logits, axis=-1)

    def propose(self, before, root, sampling, lengths):
        tokens, probs, depths = [root], [jnp.zeros((len(root), V))], [0]
        for node, parent in enumerate(self.parents[1:], 1):
            depths.append(depths[parent] + 1)
            context = (before if parent == 0 else tokens[self.parents[parent]], tokens[parent])
            law, claimed = (
                self.laws(name, context, sampling) for name in (self.law, self.claimed or self.law)
            )
            if self.apart or self.law is None:
                taken = [tokens[i] for i in range(1, node) if self.parents[i] == parent]
                left = functools.reduce(lambda x, t: x * (1 - jax.nn.one_hot(t, V)), taken, law)
                law = left / left.sum(-1, keepdims=True)
                claimed = claimed if self.claimed else law
            noise = 0.0
            if self.law is not None:
                keys = position_keys(sampling, lengths[:, None] + depths[node], Purpose.DRAFT, node)[:, 0]
                noise = jax.vmap(lambda key: jax.random.gumbel(key, (V,)))(keys)
            tokens.append(jnp.argmax(jnp.log(law) + noise, axis=-1).astype(jnp.int32))
            probs.append(claimed)
        parents = jnp.broadcast_to(jnp.array(self.parents), (len(root), len(self.parents)))
        return Draft(jnp.stack(tokens, 1), parents, None if self.law is None else jnp.stack(probs, 1))


def logits_after(draft, before):
    """[B, T, V] of the table, by the last two tokens of each node's path."""
    parent = jnp.take_along_axis(draft.tokens, jnp.maximum(draft.parents, 0), axis=1)
    parent = jnp.where(draft.parents < 0, before[:, None], parent)
    return jnp.asarray(TARGET)[parent, draft.tokens]


def step(drafter, sampling, tokens, lengths):
    """Emits what one step of every row does: (tokens, lengths, num_emitted)."""
    before, root = (jnp.take_along_axis(tokens, lengths[:, None] - i, axis=1)[:, 0] for i in (1, 0))
    draft = drafter.propose(before, root, sampling, lengths)
    acceptance = accept(draft, logits_after(draft, before), sampling, lengths)
    tokens = append_tokens(tokens, acceptance.tokens, lengths + 1)
    # A row that has emitted enough waits there: its tokens stay what they are.
    return tokens, jnp.minimum(lengths + acceptance.num_emitted, 1 + EMITTED), acceptance.num_emitted


def emit(drafter, sampling):
    """int32[B, EMITTED], the first tokens of every row, and the numbers of tokens that steps emitted."""
    batch = sampling.temperature.shape[0]
    tokens = jnp.zeros((batch, 2 + EMITTED + len(drafter.parents)), jnp.int32)
    lengths, counts = jnp.ones(batch, jnp.int32), set()
    # A new program each time: it has what a test has planted. Optimised, unlike the other tests' programs.
    options = {"xla_backend_optimization_level": 1}
    jitted = jax.jit(functools.partial(step, drafter), compiler_options=options)
    for _ in range(EMITTED):
        tokens, lengths, emitted = jitted(sampling, tokens, lengths)
        counts |= set(np.unique(emitted).tolist())
    return np.asarray(tokens[:, 2 : 2 + EMITTED]), counts


def sampling_rows(params, count):
    one = make_request([1], [1], sampling=[params]).sampling
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), one)
    return dataclasses.replace(rows, keys=row_keys(jnp.arange(count), jnp.zeros(count, jnp.uint32)))


def joint_law(params):
    """float64[V ** EMITTED]: of the first tokens of plain sampling."""
    laws = np.array([[plain_law(row, params) for row in rows] for rows in TARGET])
    return np.einsum("a,ab,abc->abc", laws[0, 0], laws[0], laws).ravel()


def p_value(drafter, draws=DRAWS, params=PARAMS):
    tokens, counts = emit(drafter, sampling_rows(params, draws))
    assert len(counts) > 1, "drafts are never or always accepted: nothing is tested"
    cells = np.ravel_multi_index(tokens.T, (V,) * EMITTED)
    return chi_square_p(np.bincount(cells, minlength=V**EMITTED), joint_law(params))


CHAINS = [(-1, 0), (-1, 0, 1), (-1, 0, 1, 2)]
FORK, SIBLINGS = (-1, 0, 0, 1, 2), (-1, 0, 0, 0, 1)
DRAFTERS = {
    "chain of 1": Drafter(CHAINS[0]),
    "chain of 2, warped like the target": Drafter(CHAINS[1], "warped"),
    "chain of 3": Drafter(CHAINS[2]),
    "two branches": Drafter(FORK),
    "three siblings without replacement": Drafter(SIBLINGS, apart=True),
    "deterministic chain": Drafter(CHAINS[1], law=None),
    "deterministic tree": Drafter(FORK, law=None),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_law_is_that_of_plain_sampling(name):
    """Nothing that a filter removes is ever emitted, either: such counts have p = 0."""
    assert p_value(DRAFTERS[name]) > PASSES


@pytest.mark.parametrize("law", ["full", None], ids=["drawn", "deterministic"])
def test_all_tokens_may_come_where_nothing_is_filtered(law):
    assert p_value(Drafter(CHAINS[0], law), PLANTED_DRAWS, SamplingParams(temperature=1.5)) > PASSES


def plant(monkeypatch, function, replacement):
    """Puts another function in place of one of the core's, in its own module."""
    monkeypatch.setattr(sys.modules[function.__module__], function.__name__, replacement)


PLANTED_DRAWS = 40_000


def test_a_missing_residual_is_found(monkeypatch):
    plant(monkeypatch, residual_law, lambda p, q: p)
    assert p_value(DRAFTERS["chain of 1"], PLANTED_DRAWS) < FAILS


def test_another_order_of_filters_is_found(monkeypatch):
    def top_p_first(logits, sampling):
        neutral = jnp.ones_like(sampling.temperature)
        cut = warp(logits, dataclasses.replace(sampling, top_k=0 * sampling.top_k))
        return warp(cut, dataclasses.replace(sampling, temperature=neutral, top_p=neutral))

    plant(monkeypatch, warp, top_p_first)
    assert p_value(DRAFTERS["chain of 1"], PLANTED_DRAWS) < FAILS
    assert p_value(DRAFTERS["deterministic chain"], PLANTED_DRAWS) < FAILS


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(Drafter(CHAINS[0], claimed="warped"), id="before filters"),
        pytest.param(Drafter((-1, 0, 0, 0), apart=True, claimed="full"), id="with replacement"),
    ],
)
def test_a_draft_from_another_law_than_it_says_is_found(drafter):
    assert p_value(drafter, PLANTED_DRAWS) < FAILS


def test_random_numbers_that_serve_two_purposes_are_found(monkeypatch):
    """Coins and drafts from the numbers that draw the emitted token."""

    def shared(sampling, positions, purpose, index=0):
        return position_keys(sampling, positions, Purpose.TOKEN)

    plant(monkeypatch, position_keys, shared)
    monkeypatch.setattr(sys.modules[accept.__module__], "position_keys", shared)
    assert p_value(Drafter(CHAINS[0]), PLANTED_DRAWS, SamplingParams(temperature=1.5)) < FAILS


def test_drafts_from_the_targets_own_law_are_all_accepted():
    _, counts = emit(Drafter(CHAINS[2], "warped", own=True), sampling_rows(PARAMS, 5000))
    assert counts == {4}


@pytest.mark.parametrize("law", ["full", None], ids=["drawn", "deterministic"])
def test_a_tiny_temperature_is_greedy(law):
    rows = [sampling_rows(SamplingParams(temperature=t), 100) for t in (0.0, 1e-3, 1e-30)]
    tokens, _ = emit(Drafter(CHAINS[1], law), jax.tree.map(lambda *x: jnp.concatenate(x), *rows))
    context, expected = (0, 0), []
    for _ in range(EMITTED):
        expected.append(int(TARGET[context].argmax()))
        context = (context[1], expected[-1])
    assert (tokens == expected).all()
