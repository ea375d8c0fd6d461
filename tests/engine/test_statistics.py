"""Counts and times of a call add up."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sv_jax.engine.results import BatchOutcome, RequestOutput, summarise
from sv_jax.engine.trace import StepCounts
from tests.engine.tiny_directory import random_prompts

K = 4
PROMPTS = random_prompts(9, 30, 3, 50, 12)


def check_counts(result, k):
    stats = result.stats
    lengths = [len(output.token_ids) for output in result.outputs]
    histogram = np.array(stats.acceptance_histogram)
    assert len(histogram) == k + 1
    row_steps, decoded = histogram.sum(), (histogram * np.arange(1, k + 2)).sum()
    assert stats.emitted_tokens == sum(lengths)
    assert decoded == sum(lengths) - len(lengths)  # each row's first token is its prefill's
    assert 0 <= stats.plain_steps <= stats.verify_steps
    assert stats.verify_steps <= row_steps <= stats.verify_steps * len(lengths)
    if row_steps:
        assert stats.mean_acceptance_length == pytest.approx(decoded / row_steps)
        assert 1 <= stats.mean_acceptance_length <= k + 1
        assert 0 <= stats.draft_coverage <= 1
    else:  # every row ended with its prefill
        assert stats.mean_acceptance_length is stats.draft_coverage is None
    return int(row_steps), int(decoded)


@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_speculative_counts(model, max_batch_size):
    result = model.generate(
        PROMPTS, max_new_tokens=60, num_speculative_tokens=K, max_batch_size=max_batch_size
    )
    row_steps, decoded = check_counts(result, K)
    stats = result.stats
    accepted = decoded - row_steps  # a step emits what it accepts and one more
    assert accepted > 0 and stats.draft_coverage > 0
    drafted = accepted / stats.draft_acceptance_rate
    assert drafted == pytest.approx(round(drafted))
    assert accepted <= round(drafted) <= K * round(stats.draft_coverage * row_steps)


def test_an_end_inside_an_accepted_run_is_not_counted_beyond_it(load, model):
    ids = model.generate(PROMPTS, max_new_tokens=60, num_speculative_tokens=K).outputs[0].token_ids
    ended = load(write={"eos": [ids[20]]}).generate(PROMPTS, max_new_tokens=60, num_speculative_tokens=K)
    check_counts(ended, K)


def test_plain_counts(model):
    result = model.generate(PROMPTS, max_new_tokens=20, draft_method="none", max_batch_size=4)
    check_counts(result, 0)
    stats = result.stats
    assert (stats.mean_acceptance_length, stats.draft_acceptance_rate, stats.draft_coverage) == (1, None, 0)
    assert stats.plain_steps == stats.verify_steps == 2 * 19


def test_times_without_compilation(load):
    """Shapes that nothing has compiled yet, then the same again: no program is made twice."""
    model = load(write={"num_hidden_layers": 1, "rms_norm_eps": 2e-5})
    prompts = random_prompts(9, 40)
    options = {"max_new_tokens": 600, "num_speculative_tokens": 3}
    first = model.generate(prompts, **options)
    second = model.generate([p[::-1] for p in prompts], **options)
    third = model.generate(random_prompts(20, 33, seed=1), ignore_eos=True, **options)
    assert first.stats.compile_seconds > 0.1
    assert second.stats.compile_seconds == third.stats.compile_seconds == 0
    for stats in (first.stats, second.stats):
        assert stats.load_seconds > 0 and stats.ttft_seconds > 0
        assert stats.tokens_per_second > 0 and stats.tpot_seconds > 0
    # Compilation is in none of the times: decoding seems about as fast in both runs.
    assert first.stats.ttft_seconds < first.stats.compile_seconds


def test_other_drafts_share_the_prefill(load):
    """A plain run after a speculative one compiles its steps only."""
    model = load(write={"num_hidden_layers": 1, "rms_norm_eps": 3e-5})
    from sv_jax.speculation.prefill import prefill_chunk

    options = {"max_new_tokens": 4}
    model.generate(random_prompts(9, 40), num_speculative_tokens=4, **options)
    before = prefill_chunk._cache_size()
    model.generate(random_prompts(9, 40), num_speculative_tokens=7, **options)
    model.generate(random_prompts(9, 40), draft_method="none", ignore_eos=True, **options)
    assert prefill_chunk._cache_size() == before


def test_statistics_are_plain_numbers(model):
    """They go into JSON as they are."""
    result = model.generate(PROMPTS, max_new_tokens=5, num_speculative_tokens=K, max_batch_size=4)
    document = json.loads(json.dumps(result.stats.as_dict(), allow_nan=False))
    assert document["emitted_tokens"] == 25 and len(document["acceptance_histogram"]) == K + 1


def outcome(token_ids, histogram, *, decode_seconds=0.0, first_token_seconds=0.5, row_seconds=None, **counts):
    names = ("drafted", "accepted", "steps_with_draft", "steps", "plain_steps")
    return BatchOutcome(
        [RequestOutput(1, ids, "", "length") for ids in token_ids],
        StepCounts(np.array(histogram), **(dict.fromkeys(names, 0) | counts)),
        first_token_seconds,
        decode_seconds,
        row_seconds or [0.0] * len(token_ids),
    )


def test_batches_are_summed():
    first = outcome(
        [[1] * 5, [1] * 3],
        [0, 2, 2],
        drafted=5,
        accepted=2,
        steps_with_draft=3,
        steps=3,
        plain_steps=1,
        decode_seconds=2.0,
        row_seconds=[2.0, 1.0],
    )
    second = outcome([[1]], [0, 0, 0], first_token_seconds=9.0)
    stats = summarise([first, second], 1.5, 2.5)
    assert stats.emitted_tokens == 9
    assert stats.tokens_per_second == 6 / 2
    assert stats.ttft_seconds == 0.5  # of the first batch
    assert stats.tpot_seconds == (2 / 4 + 1 / 2) / 2  # a row of one token has no pace
    assert stats.mean_acceptance_length == 6 / 4
    assert stats.acceptance_histogram == [2, 2]
    assert (stats.draft_acceptance_rate, stats.draft_coverage) == (2 / 5, 3 / 4)
    assert (stats.verify_steps, stats.plain_steps) == (3, 1)
    assert (stats.compile_seconds, stats.load_seconds) == (1.5, 2.5)


def test_nothing_decoded_has_no_rates():
    stats = summarise([outcome([[1]], [0, 0])], 0.0, 0.0)
    rates = (stats.tokens_per_second, stats.tpot_seconds, stats.mean_acceptance_length)
    assert rates == (None, None, None) and stats.draft_acceptance_rate is stats.draft_coverage is None
