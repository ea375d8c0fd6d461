"""generate(): what it emits is the greedy output of an independent model, at every size and edge."""

from __future__ import annotations

import numpy as np
import pytest

from sv_jax.engine import LanguageModel
from tests.engine.tiny_directory import CONTEXT, assert_greedy, random_prompts, reference_logits

K = 4
SPECULATIVE = {"num_speculative_tokens": K}
PLAIN = {"draft_method": "none"}


def limited(model: LanguageModel, max_model_len: int) -> LanguageModel:
    return LanguageModel(
        model.name,
        model.checkpoint,
        model.sharding,
        dtype="float32",
        max_model_len=max_model_len,
        progress=False,
    )


def check(prompts, result, counts):
    for prompt, output, count in zip(prompts, result.outputs, counts, strict=True):
        assert (output.prompt_tokens, output.finish_reason) == (len(prompt), "length")
        assert len(output.token_ids) == count
        assert_greedy(prompt, output.token_ids)


def test_the_reference_is_the_model(model):
    """Logits agree, so that a wrong token is the loop's fault."""
    (prompt,) = random_prompts(40)
    logits = reference_logits(prompt)
    for n in (1, 2, 33, 40):
        np.testing.assert_allclose(model.next_token_logits(prompt[:n]), logits[n - 1], atol=1e-4)


HOW = pytest.mark.parametrize("how", [SPECULATIVE, PLAIN], ids=["speculative", "plain"])


@HOW
@pytest.mark.parametrize("lengths", [(1, 2, 3, 50), (31, 32, 33, 5), (63, 64, 65, 1), (127, 128, 129, 31)])
def test_mixed_lengths_and_chunk_edges(model, lengths, how):
    prompts = random_prompts(*lengths)
    check(prompts, model.generate(prompts, max_new_tokens=20, **how), [20] * 4)


@pytest.mark.parametrize("lengths", [(511, 512, 513, 500), (1023, 1024, 1025, 1)])
def test_prompts_at_bucket_edges(model, lengths):
    prompts = random_prompts(*lengths)
    check(prompts, model.generate(prompts, max_new_tokens=12, **SPECULATIVE), [12] * 4)


@HOW
def test_the_cache_grows_twice_in_the_middle_of_decoding(model, how):
    """From 500 tokens past 512 and 1024 to the context's end; shorter rows come along."""
    prompts = random_prompts(500, 7, 499, 300)
    result = model.generate(prompts, max_new_tokens=CONTEXT, **how)
    check(prompts, result, [CONTEXT - len(p) for p in prompts])
    if how is SPECULATIVE:
        assert result.stats.mean_acceptance_length > 1.2  # or drafts were hardly tested


@HOW
@pytest.mark.parametrize("short_by", [0, 1, K])
def test_prompt_and_output_up_to_the_context(model, short_by, how):
    small = limited(model, 64)
    prompts = random_prompts(40, 40, 40, 40)
    count = 24 - short_by
    check(prompts, small.generate(prompts, max_new_tokens=count, **how), [count] * 4)


@HOW
def test_the_context_ends_rows_that_want_more(model, how):
    prompts = random_prompts(40, 62 - K, 1, 62)
    result = limited(model, 64).generate(prompts, max_new_tokens=100, **how)
    check(prompts, result, [64 - len(p) for p in prompts])


@pytest.mark.parametrize("max_model_len", [2, 64, CONTEXT])
def test_a_prompt_of_the_context_less_one_emits_one_token(model, max_model_len):
    prompts = random_prompts(*[max_model_len - 1] * 4)
    result = limited(model, max_model_len).generate(prompts, max_new_tokens=9, **SPECULATIVE)
    check(prompts, result, [1] * 4)
    assert result.stats.verify_steps == 0 and result.stats.mean_acceptance_length is None


@HOW
@pytest.mark.parametrize("count", [1, 2, K, K + 1])
def test_max_new_tokens_is_exact(model, count, how):
    prompts = random_prompts(1, 9, 30, 50)
    result = model.generate(prompts, max_new_tokens=count, **how)
    check(prompts, result, [count] * 4)
    assert result.stats.verify_steps <= count - 1


def test_more_drafted_tokens_than_the_context_has(model):
    """The largest bucket has room for a step that is longer than the context."""
    small = limited(model, 16)
    prompts = random_prompts(5, 11)
    check(prompts, small.generate(prompts, num_speculative_tokens=120), [11, 5])


def test_zero_drafted_tokens_is_plain(model):
    prompts = random_prompts(9, 30, 3, 50)
    result = model.generate(prompts, max_new_tokens=5, num_speculative_tokens=0)
    check(prompts, result, [5] * 4)
    assert result.stats.draft_acceptance_rate is None and result.stats.draft_coverage == 0


def test_a_data_axis_larger_than_the_batch(load):
    """Rows that only pad are no outputs, and count nowhere."""
    model = load(mesh=(4, 1))
    prompts = random_prompts(33)
    result = model.generate(prompts, max_new_tokens=10, **SPECULATIVE)
    check(prompts, result, [10])
    assert result.stats.emitted_tokens == 10
    assert sum(result.stats.acceptance_histogram) == result.stats.verify_steps
    # Groups are never smaller than the data axis: a group of one would take as long as one of four.
    prompts = random_prompts(9, 30, 3, 20)
    rounded_up = model.generate(prompts, max_new_tokens=10, max_batch_size=1, draft_method="none")
    check(prompts, rounded_up, [10] * 4)
    assert rounded_up.stats.verify_steps == 9


def test_groups_keep_the_callers_order(model):
    """A last group that is not full runs in the shapes of the others."""
    prompts = random_prompts(9, 30, 3, 50, 12)
    together = model.generate(prompts, max_new_tokens=6, max_batch_size=4, **SPECULATIVE)
    check(prompts, together, [6] * 5)
    one_by_one = model.generate(prompts, max_new_tokens=6, max_batch_size=1, **SPECULATIVE)
    assert one_by_one.outputs == together.outputs


def test_texts_and_token_ids_are_the_same_prompts(model):
    by_text = model.generate(["w5 w9 w5", "w1", "w2", "w3"], max_new_tokens=4, **SPECULATIVE)
    by_ids = model.generate([[5, 9, 5], np.array([1]), (2,), [3]], max_new_tokens=4, **SPECULATIVE)
    assert by_text.outputs == by_ids.outputs
    words = [f"w{i}" for i in by_ids.outputs[0].token_ids]
    assert by_text.outputs[0].text == " ".join(words)
