"""How many tokens to draft: what traces say of other lengths, and what the adaptive length makes of it.

Texts are simulated: for each token, whether there is a draft that begins there, and whether the drafter's
guess of it is right. So are costs: seconds of a plain step and of steps with K drafted tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.engine.speculation_length import (
    MOST_STEPS,
    SIZES,
    SLICE_SECONDS,
    START,
    WINDOW,
    AdaptiveLength,
    FixedLength,
    Outlook,
    SliceReport,
    outlook,
    replay,
)
from sv_jax.engine.trace import RowTrace

BUCKET = 512


def trace_of(*steps):
    """Of (drafted, proposed, right ones among what was emitted, emitted) per step, numbered from 1."""
    columns = []
    for number, (drafted, proposed, foreseen, emitted) in enumerate(steps, 1):
        columns += [(number, drafted, proposed, i < foreseen) for i in range(emitted)]
    return row_trace(columns)


def row_trace(entries):
    """Of (step, drafted, proposed, foreseen) per token; how much was read plays no part in lengths."""
    return RowTrace(*(np.array(column) for column in zip(*entries)), kv_blocks=np.zeros(len(entries)))


PLAIN, GUESSED, MISSED = (0, 0, 0, 1), (0, 3, 1, 1), (0, 3, 0, 1)  # steps that verified nothing
NONE, SOME, ALL = (3, 3, 0, 1), (3, 3, 2, 3), (3, 3, 3, 4)  # of three drafted tokens
TRACES = {
    "plain steps without proposals": ([PLAIN] * 3, "...", "..."),
    "plain steps whose proposals would have been right or wrong": ([GUESSED, MISSED, PLAIN], "dd.", "r.."),
    "a recovered token was guessed wrongly": ([SOME, NONE], "dddd", "rr.."),
    # A longer draft would have gone on as the next one did.
    "a bonus token is as good a guess as what follows": ([ALL, ALL, NONE], "d" * 9, "rrrrrrr.."),
    "and the last one of all is": ([NONE, ALL], "d" * 5, ".rrrr"),
    "a bonus token before a step without drafts": ([ALL, PLAIN], "dddd.", "rrr.."),
    "a bonus token before a guess": ([ALL, GUESSED], "d" * 5, "r" * 5),
    "fewer drafted tokens than K": ([(1, 1, 1, 2), (1, 1, 0, 1)], "ddd", "r.."),
}


def letters(flags, letter):
    return "".join(letter if flag else "." for flag in flags)


@pytest.mark.parametrize("name", TRACES)
def test_outlook(name):
    steps, drafted, right = TRACES[name]
    seen = outlook(trace_of(*steps))
    assert (letters(seen.drafted, "d"), letters(seen.right, "r")) == (drafted, right)


def test_the_outlook_is_of_the_last_tokens():
    seen = outlook(trace_of(*[ALL] * 3, *[PLAIN] * WINDOW))
    assert len(seen.right) == WINDOW and not seen.right.any() and not seen.drafted.any()
    # The window begins inside of a step, whose first tokens it does not see.
    cut = outlook(trace_of(ALL, *[PLAIN] * (WINDOW - 2)))
    assert letters(cut.right, "r")[:3] == "r.."


def outlook_of(drafted, right):
    return Outlook(np.array([c == "d" for c in drafted]), np.array([c == "r" for c in right]))


REPLAYS = {
    # (rows of drafted and right, K) -> (tokens, steps with drafts, plain steps)
    "plain": ([("dddd", "rrrr")], 0, (4, 0, 4)),
    "all right": ([("dddddddd", "rrrrrrrr")], 3, (8, 2, 0)),
    "all right, K 1": ([("dddddddd", "rrrrrrrr")], 1, (8, 4, 0)),
    "all right, longer than there is text": ([("dddd", "rrrr")], 7, (5, 1, 0)),
    "all wrong": ([("dddd", "....")], 3, (4, 4, 0)),
    "no drafts": ([("....", "....")], 3, (4, 0, 4)),
    "stops at the first wrong one": ([("dddddd", "rr.rrr")], 3, (7, 2, 0)),
    "a draft that begins in the middle": ([("..dddd", "..rrr.")], 3, (6, 1, 2)),
    "two rows in step": ([("dddd", "rrr."), ("....", "....")], 3, (5, 1, 0)),
    "two rows, plain where neither has drafts": ([("..dd", "...."), ("....", "....")], 3, (8, 2, 2)),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_replay(name):
    rows, k, expected = REPLAYS[name]
    assert replay([outlook_of(*row) for row in rows], k) == expected


@dataclasses.dataclass
class Text:
    """drafts[i]: a step that begins at token i has a draft. right[i]: its guess of token i is right."""

    drafts: np.ndarray
    right: np.ndarray

    def emit(self, start: int, k: int, verified: bool) -> list[tuple[int, int, bool]]:
        """(drafted, proposed, foreseen) of each token that a step with K = k emits."""
        proposed = k if self.drafts[start] else 0
        if not verified or not proposed:
            return [(0, proposed, bool(proposed and self.right[start]))]
        accepted = int(np.argmin(np.append(self.right[start : start + k], False)))
        return [(k, k, i < accepted) for i in range(accepted + 1)]


COSTS = {0: 0.05, 3: 0.07, 7: 0.095, 15: 0.13}
COMPILE = 3.0


@dataclasses.dataclass
class Run:
    """A simulated run: what was planned, and what it took."""

    plans: list[int]  # drafted tokens a step, by slice
    seconds: float
    compiled: set[int]

    def speed(self, tokens: int) -> float:
        """Of plain decoding's; compilation apart."""
        return tokens * COSTS[0] / self.seconds


def simulate(texts, tokens, *, costs=COSTS, compile_seconds=COMPILE, length=None):
    """Decodes `tokens` tokens of every text, the rows in step."""
    length = length or AdaptiveLength(PromptLookup)
    at, rows, step, run = [1] * len(texts), [[(0, 0, 0, False)] for _ in texts], 0, Run([], 0.0, set())
    while min(at) < tokens:
        plan = length.plan(BUCKET)
        k = plan.drafter.num_speculative_tokens
        first, seconds = step + 1, 0.0
        for _ in range(plan.max_steps):
            if min(at) >= tokens:
                break
            step += 1
            emitted = [text.emit(place, k, plan.max_drafted > 0) for text, place in zip(texts, at)]
            seconds += costs[k if any(new[0][0] for new in emitted) else 0]
            for i, new in enumerate(emitted):
                rows[i] += [(step, *entry) for entry in new]
                at[i] += len(new)
        traces = [row_trace(row) for row in rows]
        compiling = 0.0 if k in run.compiled else compile_seconds
        run.compiled.add(k)
        run.plans.append(plan.max_drafted)
        run.seconds += seconds
        length.observe(SliceReport(BUCKET, first, step - first + 1, seconds, compiling, traces))
    return run


def text(size=4000, *, coverage=1.0, right=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return Text(rng.random(size) < coverage, rng.random(size) < right)


def chat(seed):
    """43 % of the steps have a draft, which emits 1.44 tokens: too few for what it costs."""
    return text(coverage=0.43, right=1 - 1 / 1.44, seed=seed)


def test_chat_costs_little_more_than_plain_steps():
    def speed(seed, length=None):
        return simulate([chat(seed)], 128, length=length).speed(128)

    fixed = [speed(seed, FixedLength(PromptLookup(START))) for seed in range(60)]
    adaptive = [speed(seed) for seed in range(60)]
    assert np.mean(fixed) < 0.9  # the case is what it says
    assert np.mean(adaptive) >= 0.95 and np.quantile(adaptive, 0.1) >= 0.9


@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_that_are_always_wrong_are_given_up(rows):
    run = simulate([text(right=0.0, seed=seed) for seed in range(rows)], 400)
    assert run.plans[0] == START and set(run.plans[4:]) == {0}
    assert run.compiled == {START}  # plain steps need no program of their own


@pytest.mark.parametrize("rows", [1, 4])
def test_everything_accepted_takes_the_longest_drafts(rows):
    run = simulate([text()] * rows, 3000)
    assert run.plans[-1] == max(SIZES) and run.compiled == {START, max(SIZES)}


@pytest.mark.parametrize("right", [0.3, 0.5, 0.7, 0.8, 0.9])
def test_never_far_from_the_best_size(right):
    """Whichever it is, plain steps included; sizes that have no program yet are given up for a while."""

    def speed(length=None):
        runs = [simulate([text(right=right, seed=seed)], 1500, length=length) for seed in range(2)]
        return float(np.mean([run.speed(1500) for run in runs]))

    best = max(1.0, *(speed(FixedLength(PromptLookup(k))) for k in SIZES))
    assert speed() >= 0.85 * best


def test_runs_of_two_take_short_drafts():
    run = simulate([text(right=0.5)], 3000)
    assert run.plans[-40:].count(3) > 20


@pytest.mark.parametrize("coverage", [0.0, 1.0], ids=["no drafts before", "wrong drafts before"])
def test_back_from_plain_when_the_text_begins_to_repeat(coverage):
    start, size = 300, 900
    rng = np.random.default_rng(0)
    repeats = np.arange(4000) >= start
    mixed = Text(repeats | (rng.random(4000) < coverage), repeats)
    before = simulate([mixed], start)
    if coverage:
        assert before.plans[-1] == 0
    whole = simulate([mixed], size)
    # From a window behind the change on the drafts are used again, and the rest is as fast as they are.
    fastest = COSTS[START] / (START + 1)
    assert whole.seconds < before.seconds + WINDOW * COSTS[0] + 1.5 * fastest * (size - start)


def test_a_compilation_that_does_not_pay_is_not_started():
    """Longer drafts save 0.004 s a token here: a program is made once that has become what it takes."""
    assert simulate([text()], 300, compile_seconds=30.0).compiled == {START}
    assert simulate([text()], 3000).compiled == {START, max(SIZES)}
    assert simulate([text()], 300, compile_seconds=0.1).compiled == {START, max(SIZES)}


def test_what_was_measured_is_kept_for_other_texts():
    """The next call begins with drafts again, and knows what steps cost."""
    length = AdaptiveLength(PromptLookup)
    simulate([text(right=0.0)], 200, length=length)
    assert length.plan(BUCKET).max_drafted == 0
    length.restart()
    assert length.plan(BUCKET).max_drafted == START
    again = simulate([text(right=0.0)], 200, length=length)
    assert again.plans[:2] == [START, 0]


@pytest.mark.parametrize("ratio", [1.05, 1.5, 3.0])
def test_costs_are_those_of_the_machine(ratio):
    """1.9 tokens a step pay where a step with drafts costs less than that, whatever was assumed at first."""
    costs = {k: COSTS[0] * (ratio if k else 1) for k in COSTS}
    run = simulate([text(right=0.5)], 1500, costs=costs)
    drafting = sum(plan > 0 for plan in run.plans[-40:])
    assert drafting > 24 if ratio < 1.9 else drafting < 8


def test_slices_last_about_as_long_as_streaming_wants():
    length = FixedLength(NoDraft())
    assert (length.most, length.plan(BUCKET).max_drafted) == (0, 0)
    for seconds, steps in ((0.05, round(SLICE_SECONDS / 0.05)), (1e-6, MOST_STEPS), (9.0, 1)):
        length.observe(SliceReport(BUCKET, 1, 10, 10 * seconds, 0.0, []))
        assert length.plan(BUCKET).max_steps == steps
    length.observe(SliceReport(BUCKET, 1, 0, 0.0, 0.0, []))  # a slice that had no room for a step
    assert length.plan(BUCKET).max_steps > 1


def test_steps_with_drafts_in_some_row_are_counted_once():
    rows = [trace_of(ALL, PLAIN, NONE), trace_of(PLAIN, PLAIN, ALL)]
    assert [SliceReport(BUCKET, first, 3, 1.0, 0.0, rows).wide_steps for first in (1, 2, 4)] == [2, 1, 0]
