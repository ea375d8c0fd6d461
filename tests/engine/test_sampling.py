"""Sampling, log-probabilities and the adaptive draft length through `generate`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sv_jax.engine.language_model import count_occurrences
from sv_jax.engine.speculation_length import SIZES, AdaptiveLength
from sv_jax.sampling_params import SamplingParams
from sv_jax.speculation.loop import decode_slice
from tests.engine.tiny_directory import WORDS, assert_greedy, random_prompts, reference_logits
from tests.plain_decoder import PlainDecoder

NEW = 24
PROMPTS = random_prompts(9, 30, 3, 50)
SAMPLING = [
    SamplingParams(temperature=0.6, seed=3),
    SamplingParams(),
    SamplingParams(temperature=0.9, top_k=12, top_p=0.9, frequency_penalty=-0.3),
    SamplingParams(temperature=0.4, min_p=0.05, seed=8, repetition_penalty=1.2),
]
HOW = {
    "plain": {"draft_method": "none"},
    "K 0": {"num_speculative_tokens": 0},
    "K 4": {"num_speculative_tokens": 4},
    "auto": {"num_speculative_tokens": "auto"},
}


def ids_of(result):
    return [output.token_ids for output in result.outputs]


@pytest.mark.parametrize("how", HOW)
def test_rows_are_what_plain_decoding_draws(model, how):
    """Each by its own rules and seed, against penalties, filters and logits in numpy."""
    outputs = model.generate(PROMPTS, max_new_tokens=NEW, sampling=SAMPLING, **HOW[how]).outputs
    for prompt, params, output in zip(PROMPTS, SAMPLING, outputs):
        PlainDecoder(reference_logits, params).check(prompt, output.token_ids)
        assert len(output.token_ids) == NEW
    assert_greedy(PROMPTS[1], outputs[1].token_ids)


def test_what_stands_beside_a_prompt_does_not_matter(model):
    """In groups of one, in another order, or with less company."""
    options = {"max_new_tokens": NEW, "num_speculative_tokens": 4}
    expected = ids_of(model.generate(PROMPTS, sampling=SAMPLING, **options))
    assert ids_of(model.generate(PROMPTS, sampling=SAMPLING, max_batch_size=1, **options)) == expected
    order = [2, 0, 3, 1]
    prompts, sampling = ([given[i] for i in order] for given in (PROMPTS, SAMPLING))
    assert ids_of(model.generate(prompts, sampling=sampling, **options)) == [expected[i] for i in order]
    alone = model.generate([PROMPTS[3]], sampling=SAMPLING[3], **options)
    assert ids_of(alone) == [expected[3]]


def test_equal_prompts_have_texts_of_their_own(model):
    """And the same two whatever stands between them; prompts with other seeds are not counted."""
    p, q = PROMPTS[0], PROMPTS[2]
    params = SamplingParams(temperature=0.9, seed=5)
    options = {"max_new_tokens": NEW, "num_speculative_tokens": 4, "sampling": params}
    first, second, other, again = ids_of(model.generate([p, p, q, p], **options))
    assert len({tuple(ids) for ids in (first, second, again)}) == 3
    assert ids_of(model.generate([q, p, p, q], **options))[:3] == [other, first, second]
    assert ids_of(model.generate([p, q, p, q], max_batch_size=1, **options))[::2] == [first, second]
    seeds = [dataclasses.replace(params, seed=seed) for seed in (9, 5, 9, 5)]
    own = ids_of(model.generate([p, p, q, p], **(options | {"sampling": seeds})))
    assert own[1] == first and own[3] == second and own[0] != first and own[2] != other


def test_occurrences():
    a, b = SamplingParams(seed=1), SamplingParams(seed=2)
    assert count_occurrences([[1], [1], [2], [1], [1]], [a, b, a, a, b]) == [0, 0, 0, 1, 1]
    # Rows with other filters share the seed's numbers, and are told apart as well.
    assert count_occurrences([[1], [1]], [a, dataclasses.replace(a, temperature=1.0)]) == [0, 1]


def test_a_sampled_run_is_compared_with_its_own_kind(model):
    result = model.generate(PROMPTS, max_new_tokens=NEW, sampling=SAMPLING, num_speculative_tokens=4)
    report = model.compare_with_plain(result, PROMPTS)
    assert report.lossless and report.identical_rows == 4
    others = dataclasses.replace(result.settings, sampling=SAMPLING[::-1])
    assert model.compare_with_plain(dataclasses.replace(result, settings=others), PROMPTS).divergences


@pytest.mark.parametrize("words", [40, 63])
def test_ids_that_the_tokenizer_does_not_have_are_never_emitted(load, words):
    """The model's vocabulary is padded: those logits are as good as any, and must not count."""
    model = load(write={"words": words})
    sampling = [SamplingParams(), SamplingParams(temperature=2.0)] * 2
    prompts = [[token % words for token in prompt] for prompt in PROMPTS]
    outputs = model.generate(prompts, max_new_tokens=NEW, sampling=sampling, num_speculative_tokens=4).outputs
    for prompt, output in zip(prompts[::2], outputs[::2]):
        assert max(output.token_ids) < words
        decoder = PlainDecoder(lambda tokens: reference_logits(tokens)[:, :words], SamplingParams())
        decoder.check(prompt, output.token_ids)
    assert max(max(output.token_ids) for output in outputs) < words
    if words == 40:
        unpadded = reference_logits([*prompts[0], *outputs[0].token_ids]).argmax(-1)
        assert unpadded.max() >= words  # they would have been


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("k", [0, 4])
def test_logprobs(model, k):
    """Of each output token and of the most likely ones, before temperature, filters and penalties."""
    stop = [model.generate(PROMPTS, max_new_tokens=9).outputs[1].text[-7:]]
    options = {"max_new_tokens": NEW, "num_speculative_tokens": k, "sampling": SAMPLING, "stop": stop}
    outputs = model.generate(PROMPTS, logprobs=3, **options).outputs
    assert [output.finish_reason for output in outputs].count("stop") >= 1
    for prompt, output in zip(PROMPTS, outputs):
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        expected = log_softmax(reference_logits([*prompt, *output.token_ids]))[len(prompt) - 1 : -1]
        for entry, law in zip(output.logprobs, expected):
            assert entry.logprob == pytest.approx(law[entry.token_id], abs=1e-3)
            ids, values = zip(*entry.top)
            assert len(set(ids)) == 3
            np.testing.assert_allclose(values, np.sort(law)[::-1][:3], atol=1e-3)
            np.testing.assert_allclose(values, law[list(ids)], atol=1e-3)
    without = model.generate(PROMPTS, **options).outputs
    assert [dataclasses.replace(output, logprobs=None) for output in outputs] == without


class _Restless(AdaptiveLength):
    """Takes another size for every slice, and plain steps in between."""

    def observe(self, report):
        super().observe(report)
        self._program = SIZES[(SIZES.index(self._program) + 1) % len(SIZES)]
        self._speculate = not self._speculate
        self._steps = 3


def test_an_adaptive_run_emits_what_plain_decoding_does(load, monkeypatch):
    """Whatever it changes to in mid-run, with one program per size and bucket, and none for plain steps."""
    model = load(write={"rms_norm_eps": 4e-5})  # programs that no other test has compiled
    options = {"max_new_tokens": 60, "sampling": SAMPLING}
    plain = model.generate(PROMPTS, draft_method="none", **options)
    monkeypatch.setattr("sv_jax.engine.settings.AdaptiveLength", _Restless)
    monkeypatch.setattr("sv_jax.engine.language_model.AdaptiveLength", _Restless)
    before = decode_slice._cache_size()
    for _ in range(2):
        result = model.generate(PROMPTS, num_speculative_tokens="auto", **options)
        assert result.outputs == plain.outputs
        assert len(result.stats.acceptance_histogram) == max(SIZES) + 1
    assert decode_slice._cache_size() - before == len(SIZES)
    assert 0 < result.stats.draft_coverage < 1 and result.stats.mean_acceptance_length > 1


def test_an_adaptive_length_keeps_what_it_measured(load):
    model = load()
    options = {"max_new_tokens": NEW, "num_speculative_tokens": "auto", "max_batch_size": 4}
    model.generate(PROMPTS, **options)
    (length,) = model._adaptive.values()
    costs = dict(length._costs)
    assert costs
    model.generate(PROMPTS, **options)
    assert list(model._adaptive.values()) == [length] and set(costs) <= set(length._costs)
    model.generate(PROMPTS[:1], **options)  # steps of another batch cost something else
    assert len(model._adaptive) == 2


def test_texts_are_those_of_the_ids(model):
    (output,) = model.generate([PROMPTS[0]], max_new_tokens=5, sampling=SAMPLING[0]).outputs
    assert output.text == " ".join(WORDS[i] for i in output.token_ids)
