"""What lies in the cache, and in the token buffer, after a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.sharding import make_sharding
from sv_jax.speculation.commit import commit, cut_at_ends
from sv_jax.speculation.loop import has_room
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import start_state
from sv_jax.speculation.types import Acceptance, Draft
from tests.tiny import TINY, histograms, make_target, row_counts

CAPACITY, K, T = 16, 3, 4
EOS, OTHER_EOS = 50, 51


@pytest.mark.parametrize("eos_at", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("room", range(1, T + 2))
@pytest.mark.parametrize("num_emitted", range(1, T + 1))
@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_cut_at_ends(num_emitted, room, eos_at, eos):
    """Every alignment of an EOS token, the limit and the number of accepted tokens."""
    tokens = [1, 2, 3, 4]
    if eos_at is not None:
        tokens[eos_at] = eos
    kept, finished = [], False
    for token in tokens[:num_emitted]:  # plain decoding, token by token
        kept.append(token)
        finished = token in (EOS, OTHER_EOS) or len(kept) == room
        if finished:
            break
    count, ended = cut_at_ends(
        jnp.array([tokens]), jnp.array([num_emitted]), jnp.array([room]), jnp.array([[EOS, OTHER_EOS, -1]])
    )
    assert (count.item(), ended.item()) == (len(kept), finished)


def test_a_model_without_eos_never_stops_early():
    tokens = jnp.array([[0, 1, 2, 3]])
    kept, ended = cut_at_ends(tokens, jnp.array([4]), jnp.array([9]), jnp.array([[-1, -1]]))
    assert (kept.item(), ended.item()) == (4, False)


def mark(row, node, layer, part):
    """A number that says whose K/V this is."""
    return 1000 * (row + 1) + 100 * layer + 10 * part + node


def make_state(lengths, limits=None, finished=None):
    """Rows with `lengths` committed tokens; slot s of the cache holds -(s + 1), token i is i + 1."""
    batch = len(lengths)
    target = make_target()
    request = make_request([1] * batch, limits or [CAPACITY + 1] * batch, eos_ids=[[EOS]] * batch)
    state = start_state(target, request, capacity=CAPACITY)
    slots = -(jnp.arange(CAPACITY, dtype=jnp.float32) + 1)[:, None]
    cache = dataclasses.replace(
        state.cache,
        keys=tuple(jnp.broadcast_to(slots, k.shape) for k in state.cache.keys),
        values=tuple(jnp.broadcast_to(slots, v.shape) for v in state.cache.values),
    )
    return dataclasses.replace(
        state,
        cache=cache,
        tokens=jnp.broadcast_to(jnp.arange(CAPACITY + 1, dtype=jnp.int32) + 1, (batch, CAPACITY + 1)),
        lengths=jnp.array(lengths, jnp.int32),
        finished=jnp.array(finished or [False] * batch),
    )


def marked_kv(batch):
    shape = (batch, T, TINY.num_kv_heads, TINY.head_dim)

    def array(layer, part):
        marks = [[mark(row, node, layer, part) for node in range(T)] for row in range(batch)]
        return jnp.broadcast_to(jnp.array(marks, jnp.float32)[:, :, None, None], shape)

    return tuple((array(layer, 0), array(layer, 1)) for layer in range(TINY.num_layers))


def rows_of(state):
    """Per (layer, part): [B, S], after checking that all heads and channels agree."""
    for layer in range(TINY.num_layers):
        for part, arrays in enumerate((state.cache.keys, state.cache.values)):
            array = np.asarray(arrays[layer])
            assert (array == array[:, :1, :, :1]).all()
            yield layer, part, array[:, 0, :, 0]


def commit_jitted(*arguments):
    return jax.jit(commit, static_argnums=5)(*arguments, make_sharding(TINY))


def test_rows_with_different_acceptance():
    """Each row gets the K/V of its own path at its own length; a finished one emits nothing."""
    lengths = [5, 2, 9, 7]
    paths = [[0, 2, 3, 3], [0, 3, 3, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    emitted = [3, 1, 4, 4]
    tokens = [[31, 32, 33, 0], [41, 0, 0, 0], [21, 22, 23, 24], [61, 62, 63, 64]]
    before = make_state(lengths, finished=[False, False, False, True])
    draft = Draft(jnp.zeros((4, T), jnp.int32), jnp.array([[-1, 0, 0, 2]] * 4))
    acceptance = Acceptance(jnp.array(tokens), jnp.array(emitted), jnp.array(paths))
    after = commit_jitted(before, draft, draft, marked_kv(4), acceptance)

    assert after.lengths.tolist() == [8, 3, 13, 7]
    assert after.finished.tolist() == [False, False, False, True]
    for layer, part, slots in rows_of(after):
        for row, (length, path) in enumerate(zip(lengths, paths)):
            count = int(after.lengths[row]) - length
            expected = [-(s + 1) for s in range(length)]  # neighbours below: untouched
            expected += [mark(row, node, layer, part) for node in path[:count]]
            assert slots[row, : length + count].tolist() == expected
            behind = [-(s + 1) for s in range(length + T, CAPACITY)]
            assert slots[row, length + T :].tolist() == behind
    for row in range(4):
        count = int(after.lengths[row]) - lengths[row]
        history = [i + 1 for i in range(lengths[row] + 1)] + tokens[row][:count]
        assert after.tokens[row, : lengths[row] + 1 + count].tolist() == history
    assert histograms(after, T).tolist() == [
        [0, 0, 0, 1, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0],
    ]
    counts = row_counts(after, T)
    assert [row.drafted for row in counts] == [3, 3, 3, 0]
    assert [row.accepted for row in counts] == [2, 0, 3, 0]


def commit_chain(state, tokens):
    batch = len(tokens)
    draft = Draft(jnp.zeros((batch, T), jnp.int32), jnp.array([[-1, 0, 1, 2]] * batch))
    path = jnp.array([list(range(T))] * batch)
    acceptance = Acceptance(jnp.array(tokens), jnp.full(batch, T), path)
    return commit_jitted(state, draft, draft, marked_kv(batch), acceptance)


def test_an_end_inside_the_accepted_run_truncates_the_row():
    """EOS in row 0, the limit in row 1; row 2 goes on."""
    before = make_state([4, 4, 4], limits=[17, 7, 17])
    after = commit_chain(before, [[11, EOS, 13, 14], [11, 12, 13, 14], [11, 12, 13, 14]])
    assert after.finished.tolist() == [True, True, False]
    assert after.lengths.tolist() == [6, 6, 8]
    assert after.tokens[0, 5:7].tolist() == [11, EOS]
    assert after.tokens[1, 5:7].tolist() == [11, 12]  # 7 tokens in all: the limit
    assert [row.accepted for row in row_counts(after, T)] == [2, 2, 3]


def test_the_very_end_of_the_capacity():
    """Slots up to the last one are written, nothing below moves; one slot less has no room."""
    length = CAPACITY - T
    state = make_state([length, 1])
    assert bool(has_room(state, T)) and not bool(has_room(state, T + 1))
    after = commit_chain(state, [[11, 12, 13, 14]] * 2)
    for layer, part, slots in rows_of(after):
        assert slots[0, :length].tolist() == [-(s + 1) for s in range(length)]
        assert slots[0, length:].tolist() == [mark(0, node, layer, part) for node in range(T)]
    assert after.tokens[0].tolist() == [i + 1 for i in range(length + 1)] + [11, 12, 13, 14]
    assert not bool(has_room(after, 1))


def test_a_finished_row_at_the_end_stops_the_batch_too():
    """It still takes part in the write, which would be clamped onto its committed slots."""
    state = make_state([CAPACITY - 1, 1], finished=[True, False])
    assert not bool(has_room(state, T))
