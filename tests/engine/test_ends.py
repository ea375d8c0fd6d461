"""Where rows end, what callers hear meanwhile, and runs that are stopped."""

from __future__ import annotations

import pytest

from sv_jax.engine import decoding
from sv_jax.speculation.prefill import prefill_chunk
from tests.engine.tiny_directory import WORDS, assert_greedy, random_prompts

NEW = 24
SPECULATIVE = {"num_speculative_tokens": 4}
HOW = pytest.mark.parametrize("how", [SPECULATIVE, {"draft_method": "none"}], ids=["speculative", "plain"])
PROMPTS = random_prompts(9, 30, 3, 50)


@pytest.fixture(scope="module")
def outputs(model):
    """What the prompts give without an end."""
    outputs = model.generate(PROMPTS, max_new_tokens=NEW, **SPECULATIVE).outputs
    for prompt, output in zip(PROMPTS, outputs):
        assert_greedy(prompt, output.token_ids)
    return [output.token_ids for output in outputs]


def through(ids, ends):
    """`ids` up to and with the first of `ends`."""
    return ids[: min((ids.index(end) + 1 for end in ends if end in ids), default=len(ids))]


def expect(result, outputs, eos, *, special):
    for output, ids in zip(result.outputs, outputs, strict=True):
        expected = through(ids, eos)
        stopped = expected[-1] in eos
        assert output.token_ids == expected
        assert output.finish_reason == ("stop" if stopped else "length")
        shown = [i for i in expected[: len(expected) - stopped] if i not in special]
        assert output.text == " ".join(WORDS[i] for i in shown)


@HOW
@pytest.mark.parametrize("special", [True, False])
def test_eos_in_the_middle_and_as_the_first_token(load, outputs, how, special):
    """The end is in token_ids, and no text, whether or not the tokenizer calls it special."""
    middle = next(i for i, token in enumerate(outputs[0]) if i > 4 and token not in outputs[0][:i])
    eos = [outputs[0][middle], outputs[1][0]]
    hidden = eos if special else []
    model = load(write={"eos": eos, "special": hidden})
    expect(model.generate(PROMPTS, max_new_tokens=NEW, **how), outputs, eos, special=hidden)
    lengths = [len(through(ids, eos)) for ids in outputs]
    assert lengths[1] == 1 and 1 < lengths[0] < NEW
    ignoring = model.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, **how)
    expect(ignoring, outputs, [], special=hidden)


def test_eos_and_limit_at_once_is_a_stop(load, outputs):
    count = next(i for i, token in enumerate(outputs[0]) if i > 4 and token not in outputs[0][:i]) + 1
    eos = [outputs[0][count - 1]]
    result = load(write={"eos": eos}).generate(PROMPTS, max_new_tokens=count, **SPECULATIVE)
    expect(result, [ids[:count] for ids in outputs], eos, special=[])
    assert (len(result.outputs[0].token_ids), result.outputs[0].finish_reason) == (count, "stop")


def test_many_eos_ids(load, outputs):
    """More ids than one tile of the state holds; the first to occur counts."""
    eos = sorted({ids[-1] for ids in outputs} | {ids[7] for ids in outputs} | {60, 61, 62, 63})
    assert len(eos) > 4
    expect(load(write={"eos": eos}).generate(PROMPTS, max_new_tokens=NEW), outputs, eos, special=[])


def test_no_eos_id_at_all(model, outputs):
    assert model.checkpoint.eos_token_ids == ()
    result = model.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=False, **SPECULATIVE)
    expect(result, outputs, [], special=[])


class Listener:
    """Collects on_text calls and checks their order."""

    def __init__(self, rows: int) -> None:
        self.texts = [""] * rows
        self.reasons: list[str | None] = [None] * rows
        self.calls = 0

    def __call__(self, row: int, text: str, reason: str | None) -> None:
        assert text or reason, "a call that says nothing"
        assert self.reasons[row] is None, "a call after the last one"
        self.texts[row] += text
        self.reasons[row] = reason
        self.calls += 1


@HOW
@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_text_is_reported_once_and_whole(load, outputs, how, max_batch_size):
    """Rows are the caller's, in groups too, and the finish reason comes with the last tokens."""
    eos = [outputs[1][0], outputs[0][12]]
    prompts = [*PROMPTS, PROMPTS[0][::-1], PROMPTS[1]]
    listener = Listener(len(prompts))
    result = load(write={"eos": eos}).generate(
        prompts, max_new_tokens=40, max_batch_size=max_batch_size, on_text=listener, **how
    )
    assert listener.texts == [output.text for output in result.outputs]
    assert listener.reasons == [output.finish_reason for output in result.outputs]
    assert set(listener.reasons) == {"stop", "length"}
    assert listener.calls > len(prompts)


def test_rows_that_a_stop_string_ended_cost_no_more_steps(model, outputs, monkeypatch):
    """The device does not know of it: the host tells it before the next slice."""
    states = []

    def recorded(*arguments, **options):
        states.append(decoding_slice(*arguments, **options))
        return states[-1]

    decoding_slice = decoding.decode_slice
    monkeypatch.setattr(decoding, "decode_slice", recorded)
    stop = [WORDS[ids[0]] for ids in outputs[:3]]
    result = model.generate(PROMPTS, max_new_tokens=100, stop=stop, draft_method="none")
    assert [output.finish_reason for output in result.outputs[:3]] == ["stop"] * 3
    steps = len(result.outputs[3].token_ids) - 1
    assert states[-1].lengths.tolist()[:3] == [len(prompt) for prompt in PROMPTS[:3]]
    assert states[-1].lengths.tolist()[3] >= len(PROMPTS[3]) + steps
    del states[:]
    model.generate(PROMPTS[:3], max_new_tokens=100, stop=stop, draft_method="none")
    assert states == []


def stop_at(call: int, *, once: bool = False):
    """should_stop that says True at its call-th call and, unless `once`, ever after."""
    calls = 0

    def ask() -> bool:
        nonlocal calls
        calls += 1
        return calls == call if once else calls >= call

    return ask


@pytest.mark.parametrize("once", [True, False])
def test_stopped_between_slices(model, once):
    """What was emitted stays, the group that never ran has nothing, and no row has ended."""
    prompts = random_prompts(9, 30, 3, 50, 12)
    listener = Listener(5)
    # Calls: before the prefill's chunk, then before each slice.
    result = model.generate(
        prompts,
        max_new_tokens=500,
        max_batch_size=4,
        on_text=listener,
        should_stop=stop_at(4, once=once),
        **SPECULATIVE,
    )
    assert result.interrupted
    assert [o.finish_reason for o in result.outputs] == ["interrupted"] * 5
    assert [o.text for o in result.outputs] == listener.texts
    assert listener.reasons == [None] * 5
    for prompt, output in zip(prompts[:4], result.outputs):
        assert 1 < len(output.token_ids) < 500
        assert_greedy(prompt, output.token_ids)
    assert (result.outputs[4].token_ids, result.outputs[4].text) == ([], "")
    assert result.outputs[4].prompt_tokens == 12
    assert result.stats.emitted_tokens == sum(len(o.token_ids) for o in result.outputs)


@pytest.mark.parametrize("once", [True, False])
def test_stopped_during_prefill(model, once):
    """A row whose prompt was through has its first token; a half-read prompt must not be decoded."""
    prompts = random_prompts(5, 1040, 40, 530)
    result = model.generate(prompts, should_stop=stop_at(2, once=once), **SPECULATIVE)
    assert result.interrupted
    assert [len(output.token_ids) for output in result.outputs] == [1, 0, 1, 0]
    assert [output.finish_reason for output in result.outputs] == ["interrupted"] * 4
    assert_greedy(prompts[0], result.outputs[0].token_ids)


def test_stops_are_heard_between_chunks(model, monkeypatch):
    """Dispatch is asynchronous: without waiting, all chunks are under way before anyone can stop them."""
    states = []

    def recorded(*arguments):
        states.append(prefill_chunk(*arguments))
        return states[-1]

    def ask() -> bool:
        assert not states or states[-1].lengths.is_ready()
        return False

    monkeypatch.setattr(decoding, "prefill_chunk", recorded)
    prompts = random_prompts(5, 1040, 40, 530)
    model.generate(prompts, max_new_tokens=1, should_stop=ask, **SPECULATIVE)
    assert len(states) >= 3


def test_stopped_at_once(model):
    result = model.generate(PROMPTS, should_stop=lambda: True, **SPECULATIVE)
    assert result.interrupted and all(not output.token_ids for output in result.outputs)
    stats = result.stats
    assert (stats.emitted_tokens, stats.verify_steps, stats.tokens_per_second) == (0, 0, None)


def test_stopped_after_everything_was_done(model, outputs):
    """A stop that comes too late interrupts nothing."""
    result = model.generate(PROMPTS, max_new_tokens=1, should_stop=stop_at(2), **SPECULATIVE)
    assert not result.interrupted
    expect(result, [ids[:1] for ids in outputs], [], special=[])


def test_stopped_after_some_rows_ended(model):
    """Rows that were done keep their reason."""
    prompts = random_prompts(1090, 9, 1090, 30)
    listener = Listener(4)
    result = model.generate(
        prompts,
        max_new_tokens=1000,
        on_text=listener,
        should_stop=lambda: listener.reasons[::2] == ["length", "length"],
        **SPECULATIVE,
    )
    assert [o.finish_reason for o in result.outputs] == ["length", "interrupted", "length", "interrupted"]
    assert listener.reasons == ["length", None, "length", None]
