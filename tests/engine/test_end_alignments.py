"""Ends at every place of an accepted run: EOS tokens, stop strings, limits and minimum lengths, K = 1 .. 8.

The drafter knows the text, so that runs are as long as K allows; plain decoding is what must come out.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from sv_jax.drafts.none import NoDraft
from sv_jax.engine.decoding import BatchRequest, decode_batch
from sv_jax.engine.results import GenerationResult, summarise
from sv_jax.engine.settings import Settings
from sv_jax.engine.speculation_length import FixedLength, SlicePlan
from sv_jax.sampling_params import GREEDY, SamplingParams
from tests.drafters import Scripted
from tests.engine.test_ends import Listener
from tests.engine.test_statistics import check_counts
from tests.engine.tiny_directory import WORDS, random_prompts, reference_logits
from tests.plain_decoder import PlainDecoder

NEW, MOST = 24, 8
PROMPTS = random_prompts(9, 30, 3, 50)
ROWS = range(len(PROMPTS))
EVERY_K = pytest.mark.parametrize("k", range(1, MOST + 1))
# Greedy rows and sampled ones: ends do not care. (Without filters: a suppressed EOS token that would not have
# been drawn changes nothing.)
SAMPLING = [GREEDY, SamplingParams(temperature=0.7, seed=1), GREEDY, SamplingParams(temperature=0.5)]


class Capped(FixedLength):
    """K of a drafter that could draft more: one program for all K. Slices are short, and differ."""

    def __init__(self, drafter, k):
        super().__init__(drafter)
        self._k = k
        self._slices = 0

    def plan(self, bucket):
        self._slices += 1
        return SlicePlan(self.drafter, self._k, 1 + self._slices % 3)


@dataclasses.dataclass
class Ends:
    """Decodes PROMPTS with some ends, by K; 0 decodes plainly."""

    model: object

    def __post_init__(self):
        self.plain = functools.cache(self._plain)
        self.texts = [output.token_ids for output in self.plain().outputs]
        script = tuple((*prompt, *text) for prompt, text in zip(PROMPTS, self.texts))
        self.oracle = Scripted(script, MOST, right=(MOST,))

    def _run(self, length, max_new_tokens=NEW, **ends):
        request = BatchRequest(
            prompts=PROMPTS,
            first_row=0,
            sampling=SAMPLING,
            occurrences=[0] * len(PROMPTS),
            max_new_tokens=max_new_tokens,
            max_model_len=self.model.max_model_len,
            vocab_size=self.model.tokenizer.vocab_size,
            **({"eos_ids": ()} | ends),
        )
        listener = Listener(len(PROMPTS))
        outcome = decode_batch(
            self.model.target,
            self.model.params,
            length,
            request,
            tokenizer=self.model.tokenizer,
            batch_size=len(PROMPTS),
            on_text=listener,
        )
        assert listener.texts == [output.text for output in outcome.outputs]
        assert listener.reasons == [output.finish_reason for output in outcome.outputs]
        return GenerationResult(outcome.outputs, summarise([outcome], 0.0, 0.0), Settings())

    def _plain(self, **ends):
        return self._run(FixedLength(NoDraft()), **ends)

    def speculative(self, k, **ends):
        """The result, after checking it and its statistics against plain decoding's."""
        result, plain = self._run(Capped(self.oracle, k), **ends), self.plain(**ends)
        assert result.outputs == plain.outputs, ends
        check_counts(result, MOST)
        assert result.stats.emitted_tokens == plain.stats.emitted_tokens
        assert result.stats.acceptance_histogram[k + 1 :] == [0] * (MOST - k)
        return result


@pytest.fixture(scope="module")
def ends(model):
    return Ends(model)


CALLS = NEW // 2


def places(at, apart=CALLS):
    """(row, position) of each row for the call number `at`: over CALLS calls every position, in two rows."""
    return [(row, (at + apart * row) % NEW) for row in ROWS]


def alignments(result, k):
    """Where in its run the last token of each row that stopped stood: 0 is the first drafted one, k the bonus
    token of a whole run."""
    lengths = [len(o.token_ids) for o in result.outputs if o.finish_reason == "stop"]
    return {(count - 2) % (k + 1) if count > 1 else "prefill" for count in lengths}


def spoken(ids):
    return " ".join(WORDS[i] for i in ids)


def through(ids, eos):
    """Up to and with the first EOS id, by definition."""
    return ids[: min((ids.index(end) + 1 for end in eos if end in ids), default=len(ids))]


@EVERY_K
def test_eos_tokens(ends, k):
    seen = set()
    for at in range(CALLS):
        eos = tuple(sorted({ends.texts[row][place] for row, place in places(at)}))
        result = ends.speculative(k, eos_ids=eos)
        seen |= alignments(result, k)
        for output, ids in zip(result.outputs, ends.texts):
            expected = through(ids, eos)
            stopped = expected[-1] in eos
            assert output.token_ids == expected
            assert output.finish_reason == ("stop" if stopped else "length")
            assert output.text == spoken(expected[: len(expected) - stopped])
    assert seen == {*range(k + 1), "prefill"}


def stop_text(ids, place, kind):
    """A text that ends with the token at `place`, or within it, and begins there or up to two before."""
    whole = spoken(ids[max(0, place - kind % 3) : place + 1])
    return whole[:-1] if kind % 2 else whole


def cut(ids, stops, include):
    """(ids, text, whether it stopped) of plain ids, token by token and by definition."""
    for count in range(1, len(ids) + 1):
        text = spoken(ids[:count])
        found = [(text.index(stop), -len(stop)) for stop in stops if stop in text]
        if found:
            start, length = min(found)
            return ids[:count], text[: start - length if include else start], True
    return ids, text, False


@EVERY_K
def test_stop_strings(ends, k):
    seen = set()
    for at in range(NEW):
        stops = tuple(stop_text(ends.texts[row], place, at + row) for row, place in places(at, 7))
        include = at % 4 == 0
        result = ends.speculative(k, stop=stops, include_stop=include)
        seen |= alignments(result, k)
        for output, ids in zip(result.outputs, ends.texts):
            expected, text, stopped = cut(ids, stops, include)
            assert (output.token_ids, output.text) == (expected, text)
            assert output.finish_reason == ("stop" if stopped else "length")
    assert seen == {*range(k + 1), "prefill"}


@EVERY_K
def test_stop_strings_that_an_eos_token_breaks_up(ends, k):
    """An EOS token has no text: what would be a stop text with it ends the row before it is complete."""
    for at in range(1 + k % 2, NEW - 1, 2):
        row = at % len(PROMPTS)
        ids = ends.texts[row]
        result = ends.speculative(k, eos_ids=(ids[at],), stop=(spoken(ids[at - 1 : at + 2]),))
        expected = through(ids, [ids[at]])
        output = result.outputs[row]
        assert (output.token_ids, output.text) == (expected, spoken(expected[:-1]))


@EVERY_K
def test_new_token_limits(ends, k):
    for count in range(1, NEW + 1):
        result = ends.speculative(k, max_new_tokens=count)
        for output, ids in zip(result.outputs, ends.texts):
            assert (output.token_ids, output.finish_reason) == (ids[:count], "length")
            assert output.text == spoken(ids[:count])


@EVERY_K
def test_minimum_lengths(ends, k):
    """Just below, at and above an EOS token that the draft proposes, at every place of a run: it is not
    emitted too early, and what comes instead is the best of the others."""
    suppressed = 0
    for at in range(k % 2, NEW, 2):
        row, place = at % len(PROMPTS), at
        eos = (ends.texts[row][place],)
        first = ends.texts[row].index(eos[0])
        for least in (first, first + 1 + 2 * (at % 3)):
            if least > NEW:
                continue
            result = ends.speculative(k, eos_ids=eos, min_new_tokens=least)
            ids = result.outputs[row].token_ids
            if least <= first:  # soon enough
                assert ids == ends.texts[row][: first + 1]
            else:
                assert ids[:first] == ends.texts[row][:first] and ids[first] not in eos
                suppressed += 1
            for output in result.outputs:
                assert eos[0] not in output.token_ids[:least]
    assert suppressed > NEW // 4


def test_plain_decoding_picks_the_best_of_the_other_tokens(ends):
    """The reference of the test above, against numpy."""
    eos = tuple({ids[5] for ids in ends.texts})
    result = ends.plain(eos_ids=eos, min_new_tokens=12)
    for prompt, params, output in zip(PROMPTS, SAMPLING, result.outputs):
        decoder = PlainDecoder(reference_logits, params, eos_ids=eos, min_new_tokens=12)
        decoder.check(prompt, output.token_ids)
        assert len(output.token_ids) >= 12
    assert any(output.token_ids[:6] != ids[:6] for output, ids in zip(result.outputs, ends.texts))


def test_stop_strings_count_before_the_minimum(ends):
    stops = (spoken(ends.texts[0][2:4]),)
    (output, *_) = ends.speculative(4, stop=stops, min_new_tokens=20).outputs
    assert (output.token_ids, output.finish_reason) == (ends.texts[0][:4], "stop")


HOW = {"drafts": {"num_speculative_tokens": 4}, "plain": {"draft_method": "none"}}


@pytest.mark.parametrize("how", HOW)
def test_stop_strings_where_eos_is_ignored(load, ends, how):
    """An EOS token is text then, which a stop string may contain."""
    ids = ends.texts[0]
    model = load(write={"eos": [ids[3]]})
    options = {"max_new_tokens": NEW, "stop": [spoken(ids[3:6])], "sampling": SAMPLING, **HOW[how]}
    (output, *_) = model.generate(PROMPTS, ignore_eos=True, **options).outputs
    assert (output.token_ids, output.text) == (ids[:6], spoken(ids[:3]) + " ")
    (output, *_) = model.generate(PROMPTS, **options).outputs
    expected = through(ids, [ids[3]])
    assert (output.token_ids, output.text) == (expected, spoken(expected[:-1]))
