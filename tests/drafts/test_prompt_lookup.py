"""Prompt lookup as a table, against a search in plain Python, and at its edges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.config import UserError
from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import start_state
from tests.tiny import make_target

CAPACITY = 24
JUNK = 1  # what lies behind the history; occurs in histories too, so that reading it would show


def state_of(histories):
    """Rows whose tokens so far are `histories`; the last one is the root."""
    lengths = np.array([len(h) - 1 for h in histories], np.int32)
    request = make_request(lengths + 1, [CAPACITY] * len(histories))
    state = start_state(make_target(), request, capacity=CAPACITY)
    tokens = np.full((len(histories), CAPACITY + 1), JUNK, np.int32)
    for row, history in zip(tokens, histories):
        row[: len(history)] = history
    return dataclasses.replace(state, tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths))


def drafts_of(drafter, histories):
    """The drafted tokens of each row, as lists, after checking that each is a chain below the root."""
    draft = jax.jit(drafter.propose)(state_of(histories))
    assert draft.tokens[:, 0].tolist() == [h[-1] for h in histories]
    result = []
    for tokens, parents in zip(np.asarray(draft.tokens), np.asarray(draft.parents)):
        count = int((parents >= 0).sum())
        assert parents.tolist() == [-1, *range(count)] + [-1] * (len(parents) - 1 - count)
        result.append(tokens[1 : count + 1].tolist())
    return result


def search(history, max_ngram, num_tokens):
    """Longest n first, then the most recent earlier occurrence; goes on with itself at the end."""
    for n in range(max_ngram, 0, -1):
        for start in reversed(range(len(history) - n)):
            if len(history) > n and history[start : start + n] == history[-n:]:
                extended = list(history)
                for i in range(num_tokens):
                    extended.append(extended[start + n + i])
                return extended[len(history) :]
    return []


TABLE = {
    "one earlier place": ([5, 6, 7, 8, 9, 2, 5], [6, 7, 8, 9]),
    "most recent of two": ([5, 6, 2, 5, 7, 2, 3, 4, 5], [7, 2, 3, 4]),
    # [3, 5] stands before 6; 5 alone stands later, before 7.
    "longer n-gram beats a more recent one": ([3, 5, 6, 8, 9, 5, 7, 2, 3, 5], [6, 8, 9, 5]),
    "three beats two": ([2, 3, 5, 6, 0, 9, 3, 5, 7, 0, 2, 3, 5], [6, 0, 9, 3]),
    "runs into the end: goes on with itself": ([9, 5, 6, 5, 6], [5, 6, 5, 6]),
    "one token over and over": ([9, 5, 5], [5, 5, 5, 5]),
    "continuation shorter than K": ([5, 6, 7, 5], [6, 7, 5, 6]),
    "nothing stood here before": ([5, 6, 7, 8], []),
    "one token": ([5], []),
    "two tokens": ([5, 6], []),
    "two equal tokens": ([5, 5], [5, 5, 5, 5]),
    "three tokens, n = 3": ([5, 6, 5], [6, 5, 6, 5]),
    # The history ends with [1]; behind it lies JUNK = 1, which must be neither suffix nor match.
    "leftovers are no history": ([1], []),
    "leftovers are no continuation": ([8, 1, 9, 1], [9, 1, 9, 1]),
    "token 0": ([0, 4, 0], [4, 0, 4, 0]),
}


@pytest.mark.parametrize("name", TABLE)
def test_table_agrees_with_the_search(name):
    history, expected = TABLE[name]
    assert search(history, 3, 4) == expected


def test_table_as_one_batch():
    """Rows of different length, with and without a draft, side by side."""
    histories = [history for history, _ in TABLE.values()]
    drafts = drafts_of(PromptLookup(4), histories)
    assert dict(zip(TABLE, drafts)) == {name: expected for name, (_, expected) in TABLE.items()}


@pytest.mark.parametrize("max_ngram", [1, 2, 5])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_random_histories(max_ngram, num_tokens):
    rng = np.random.default_rng(max_ngram)
    histories = [rng.integers(0, 3, n).tolist() for n in [*range(1, CAPACITY + 1), *range(1, 20)]]
    drafts = drafts_of(PromptLookup(num_tokens, max_ngram), histories)
    assert drafts == [search(history, max_ngram, num_tokens) for history in histories]


def test_a_row_that_only_pads_the_batch():
    """No prompt at all (length 0, history of one leftover token): no draft, nothing out of range."""
    state = dataclasses.replace(state_of([[5, 6, 5]]), lengths=jnp.zeros(1, jnp.int32))
    assert PromptLookup(4).propose(state).num_drafted.tolist() == [0]


@pytest.mark.parametrize("options", [(0,), (-1,), (4, 0)])
def test_refusals(options):
    with pytest.raises(UserError, match=rf"num_speculative_tokens={options[0]}.*at least 1"):
        PromptLookup(*options)


def test_no_draft():
    draft = NoDraft().propose(state_of([[5, 6, 5], [7]]))
    assert draft.tokens.tolist() == [[5], [7]] and draft.parents.tolist() == [[-1], [-1]]
    assert NoDraft().num_speculative_tokens == 0
