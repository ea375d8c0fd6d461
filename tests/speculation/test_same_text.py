"""One seed, one text: whatever is drafted, stands beside it, or cuts the work into pieces."""

import dataclasses
import functools

import pytest

from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.sampling_params import SamplingParams
from tests.drafters import run_script
from tests.plain_decoder import PlainDecoder, logits_of
from tests.tiny import TINY, decode, histograms, make_model, prefilled, random_prompts, row_counts, sequences

NEW = 40
PROMPTS = random_prompts((5, 20, 33, 1))
SAMPLING = [
    SamplingParams(temperature=0.6, seed=1),
    SamplingParams(temperature=0.4, top_k=10, seed=2**32 - 1),
    SamplingParams(temperature=0.5, top_p=0.9, seed=3, presence_penalty=-0.5),
    SamplingParams(temperature=0.3, min_p=0.02, seed=1, repetition_penalty=1.1),
]
DECODERS = [PlainDecoder(functools.partial(logits_of, *make_model()), params) for params in SAMPLING]


@functools.cache
def plain():
    return decode(*make_model(), NoDraft(), PROMPTS, new_tokens=NEW, sampling=SAMPLING)[0]


def check(texts, rows=(0, 1, 2, 3)):
    for text, row in zip(texts, rows, strict=True):
        start = len(PROMPTS[row])
        DECODERS[row].check_same(PROMPTS[row], text[start:], plain()[row][start:])


def test_plain_decoding_draws_what_the_seed_says():
    """Against penalties and filters in numpy, with the noise of each row's seed and positions."""
    for decoder, prompt, text in zip(DECODERS, PROMPTS, plain()):
        decoder.check(prompt, text[len(prompt) :])


def test_the_check_bites():
    output = plain()[0][len(PROMPTS[0]) :]
    wrong = [*output[:7], (output[7] + 1) % 64, *output[8:]]
    with pytest.raises(AssertionError, match=r"token 7 is .* apart"):
        DECODERS[0].check_same(PROMPTS[0], wrong, output)
    with pytest.raises(AssertionError, match="below the best"):
        DECODERS[0].check(PROMPTS[0], wrong)
    with pytest.raises(AssertionError, match="39 tokens, 40 expected"):
        DECODERS[0].check_same(PROMPTS[0], output[:-1], output)


@pytest.mark.parametrize("k", range(1, 9))
def test_prompt_lookup(k):
    got, state = decode(*make_model(), PromptLookup(k), PROMPTS, new_tokens=NEW, sampling=SAMPLING)
    check(got)
    assert sum(row.accepted for row in row_counts(state, k + 1)) > 0  # or nothing was tested


@pytest.mark.parametrize(("num_tokens", "branches"), [(8, 1), (6, 2), (6, 3)])
@pytest.mark.parametrize("right", ["all", "none", "changing"])
def test_scripted_drafts(num_tokens, branches, right):
    """Chains and trees, whose accepted runs are long or short."""
    depth = num_tokens // branches
    patterns = {"all": (depth,), "none": (0,), "changing": (0, 2, 1, depth, 1, 2, 0, depth)}
    limits = [len(prompt) + NEW for prompt in PROMPTS]
    state = prefilled(*make_model(), PROMPTS, limits=limits, sampling=SAMPLING)
    sizes = {"num_tokens": num_tokens, "branches": branches}
    state = run_script(*make_model(), state, plain(), patterns[right], **sizes)
    check(sequences(state))
    histogram = histograms(state, depth + 1).sum(0)
    steps = {"all": {1 + depth}, "none": {1}, "changing": {1, 2, 1 + depth}}[right]
    assert set(histogram.nonzero()[0]) >= steps and (right != "none" or histogram[2:].sum() == 0)


def test_alone():
    for row in range(4):
        one = {"new_tokens": NEW, "sampling": [SAMPLING[row]]}
        got, _ = decode(*make_model(), PromptLookup(4), [PROMPTS[row]], **one)
        check(got, [row])


@pytest.mark.parametrize("rows", [(3, 1, 0, 2), (2, 2, 2, 0), (1, 3, 3, 3)])
def test_other_places_and_other_company(rows):
    prompts, sampling = ([given[row] for row in rows] for given in (PROMPTS, SAMPLING))
    got, _ = decode(*make_model(), PromptLookup(4), prompts, new_tokens=NEW, sampling=sampling)
    check(got, rows)


@pytest.mark.parametrize(
    "options", [{"max_steps": 3}, {"max_steps": 1}, {"capacity": 64}, {"chunk": 32}], ids=str
)
def test_other_slices_buckets_and_chunks(options):
    got, _ = decode(*make_model(), PromptLookup(4), PROMPTS, new_tokens=NEW, sampling=SAMPLING, **options)
    check(got)


@pytest.mark.parametrize("mesh", [(2, 2), (4, 2)], ids=["2x2", "4x2"])
def test_meshes(mesh):
    model = make_model(TINY, mesh)
    got, _ = decode(*model, PromptLookup(4), PROMPTS, new_tokens=NEW, sampling=SAMPLING)
    check(got)


def test_another_seed_or_occurrence_is_another_text():
    others = [dataclasses.replace(params, seed=params.seed ^ 4) for params in SAMPLING]
    for changes in ({"sampling": others}, {"sampling": SAMPLING, "occurrences": [1, 2, 1, 1]}):
        got, _ = decode(*make_model(), PromptLookup(4), PROMPTS, new_tokens=NEW, **changes)
        assert all(text != expected for text, expected in zip(got, plain()))


def test_greedy_rows_do_not_mind_sampled_ones():
    greedy, _ = decode(*make_model(), NoDraft(), PROMPTS, new_tokens=NEW)
    sampling = [SamplingParams(seed=5), SAMPLING[1], SamplingParams(top_k=1), SAMPLING[3]]
    got, _ = decode(*make_model(), PromptLookup(4), PROMPTS, new_tokens=NEW, sampling=sampling)
    assert got[::2] == greedy[::2]
    check(got[1::2], [1, 3])
