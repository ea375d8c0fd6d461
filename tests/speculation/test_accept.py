"""Which drafts are kept, as a table of cases. The target's token after each node is part of the case."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.sampling_params import SamplingParams
from sv_jax.speculation.accept import accept
from sv_jax.speculation.loop import prune
from sv_jax.speculation.request import make_request
from sv_jax.speculation.types import Draft

VOCAB = 10
CHAIN = [-1, 0, 1, 2]
PLAIN = [-1, -1, -1, -1]
SHORT = [-1, 0, -1, -1]
TWO_CHAINS = [-1, 0, 0, 1, 2]
SIBLINGS = [-1, 0, 0, 0]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    parents: list[int]
    tokens: list[int]
    best: list[int]  # argmax after each node
    emitted: list[int]
    path: list[int]


CASES = [
    Case("chain, all", CHAIN, [1, 2, 3, 4], [2, 3, 4, 5], [2, 3, 4, 5], [0, 1, 2, 3]),
    Case("chain, none", CHAIN, [1, 2, 3, 4], [9, 3, 4, 5], [9], [0]),
    Case("chain, some", CHAIN, [1, 2, 3, 4], [2, 9, 4, 5], [2, 9], [0, 1]),
    # Position 3 agrees again behind the rejection, and must not count.
    Case("chain, agreement after a rejection", CHAIN, [1, 2, 3, 4], [2, 9, 4, 4], [2, 9], [0, 1]),
    Case("chain, repeated token", CHAIN, [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 2, 3]),
    Case("token 0", CHAIN, [0, 0, 0, 0], [0, 0, 3, 0], [0, 0, 3], [0, 1, 2]),
    Case("no draft", PLAIN, [1, 0, 0, 0], [7, 0, 0, 0], [7], [0]),
    # An empty slot whose leftover token is what the target wants is still not drafted.
    Case("no draft, lucky leftovers", PLAIN, [1, 7, 7, 7], [7, 7, 7, 7], [7], [0]),
    Case("short draft, accepted", SHORT, [1, 2, 3, 4], [2, 3, 4, 5], [2, 3], [0, 1]),
    Case("short draft, rejected", SHORT, [1, 2, 3, 4], [9, 3, 4, 5], [9], [0]),
    Case("first branch", TWO_CHAINS, [1, 2, 3, 4, 5], [2, 4, 0, 6, 0], [2, 4, 6], [0, 1, 3]),
    Case("second branch", TWO_CHAINS, [1, 2, 3, 4, 5], [3, 0, 5, 0, 7], [3, 5, 7], [0, 2, 4]),
    Case("second branch in part", TWO_CHAINS, [1, 2, 3, 4, 5], [3, 4, 8, 0, 7], [3, 8], [0, 2]),
    Case("neither branch", TWO_CHAINS, [1, 2, 3, 4, 5], [8, 4, 5, 0, 7], [8], [0]),
    # Node 4 is right after node 2, but node 2 itself is not.
    Case("orphan agreement", TWO_CHAINS, [1, 2, 3, 4, 5], [2, 9, 5, 0, 7], [2, 9], [0, 1]),
    # Both siblings hold the right token; only the second goes on.
    Case("duplicate siblings", TWO_CHAINS, [1, 2, 2, 4, 5], [2, 5, 5, 0, 7], [2, 5, 7], [0, 2, 4]),
    Case("duplicate leaves", SIBLINGS, [1, 2, 2, 2], [2, 6, 6, 6], [2, 6], [0, 1]),
    Case("last sibling", SIBLINGS, [1, 2, 3, 4], [4, 6, 6, 7], [4, 7], [0, 3]),
]


def logits_with(best):
    logits = np.random.default_rng(0).uniform(-1, 1, (*np.shape(best), VOCAB))
    np.put_along_axis(logits, np.array(best)[..., None], 2.0, axis=-1)
    return jnp.asarray(logits, jnp.float32)


def check(case, acceptance, row):
    count = int(acceptance.num_emitted[row])
    assert acceptance.tokens[row, :count].tolist() == case.emitted
    assert acceptance.path[row, :count].tolist() == case.path


def run(cases, *, probs=None, temperatures=None):
    """`accept` on the cases as one batch of greedy rows, or with these temperatures."""
    draft = Draft(jnp.array([c.tokens for c in cases]), jnp.array([c.parents for c in cases]), probs)
    sampling = [SamplingParams(temperature=t) for t in temperatures or [0.0] * len(cases)]
    rows = [5] * len(cases)
    sampling = make_request(rows, rows, sampling=sampling).sampling
    return jax.jit(accept)(draft, logits_with([c.best for c in cases]), sampling, jnp.array(rows))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_alone(case):
    check(case, run([case]), 0)


@pytest.mark.parametrize("num_nodes", [4, 5])
def test_in_one_batch(num_nodes):
    """Rows with other trees and other outcomes beside them come out the same."""
    cases = [case for case in CASES if len(case.tokens) == num_nodes]
    acceptance = run(cases)
    for row, case in enumerate(cases):
        check(case, acceptance, row)


@pytest.mark.parametrize("beside", [0.0, 1.0], ids=["greedy batch", "beside a sampled row"])
@pytest.mark.parametrize("num_nodes", [4, 5])
def test_greedy_rows_of_drafts_with_laws(num_nodes, beside):
    """The argmax alone decides, whatever law the draft was drawn from. (Of equal siblings rejection sampling
    takes the first, which need not be the one that goes on.)"""
    cases = [c for c in CASES if len(c.tokens) == num_nodes and "duplicate" not in c.name]
    probs = jax.random.dirichlet(jax.random.key(1), jnp.ones(VOCAB), (len(cases) + 1, num_nodes))
    acceptance = run([*cases, cases[0]], probs=probs, temperatures=[0.0] * len(cases) + [beside])
    for row, case in enumerate(cases):
        check(case, acceptance, row)


def test_prune_empties_what_could_not_be_emitted():
    draft = Draft(jnp.zeros((4, 5), jnp.int32), jnp.array([TWO_CHAINS] * 4))
    pruned = prune(draft, jnp.array([-1, 0, 1, 2]))
    assert pruned.parents.tolist() == [[-1] * 5, [-1] * 5, [-1, 0, 0, -1, -1], TWO_CHAINS]
