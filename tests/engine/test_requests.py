"""What generate() refuses, at once and with the value and what is allowed."""

from __future__ import annotations

import pytest

from sv_jax.config import UserError
from sv_jax.sampling_params import SamplingParams
from tests.engine.tiny_directory import CONTEXT, V

REFUSED = {
    "K below 0": ([[1]], {"num_speculative_tokens": -1}, r"num_speculative_tokens=-1; allowed: 0 .* or more"),
    "K in words": ([[1]], {"num_speculative_tokens": "many"}, r"='many'; allowed: 0 .* or more, or 'auto'"),
    "more to come than may": (
        [[1]],
        {"min_new_tokens": 9, "max_new_tokens": 8},
        r"min_new_tokens=9; allowed: 0 to 8 \(max_new_tokens\)",
    ),
    "too many logprobs": ([[1]], {"logprobs": 21}, r"logprobs=21; allowed: 0 to 20"),
    "one stop text": ([[1]], {"stop": "END"}, r"stop='END' is not allowed; allowed: a list of texts"),
    "an empty stop text": ([[1]], {"stop": ["a", ""]}, r"stop='' is not allowed; .* that are not empty"),
    "sampling of other prompts": (
        [[1], [2]],
        {"sampling": [SamplingParams()]},
        r"sampling has 1 entries for 2 prompts; give one, or one per prompt",
    ),
    "draft method": ([[1]], {"draft_method": "magic"}, r"'magic'; allowed: prompt-lookup, none"),
    "no new tokens": ([[1]], {"max_new_tokens": 0}, r"max_new_tokens=0; allowed: 1 or more"),
    "no batch": ([[1]], {"max_batch_size": 0}, r"max_batch_size=0; allowed: 1 or more"),
    "no prompts": ([], {}, r"no prompts; give at least one"),
    "no tokens": ([[1], []], {}, r"prompt 2 has no tokens; give at least one"),
    "a prompt of the context": (
        [[1], [1] * CONTEXT],
        {},
        rf"prompt 2 has {CONTEXT} tokens; allowed: at most {CONTEXT - 1}, the context of {CONTEXT}",
    ),
    "an id beyond the vocabulary": ([[1, V]], {}, rf"prompt 1 has a token id outside 0 \.\. {V - 1}"),
    "an id below 0": ([[1], [2, -1]], {}, rf"prompt 2 has a token id outside 0 \.\. {V - 1}"),
    "an empty text": (["w1", ""], {}, "a prompt is empty; give at least one character"),
    "a blank text": (["  "], {}, "prompt 1 has no tokens"),
    "one text": ("w1 w2", {}, r"prompts is one text, 'w1 w2'; give a list of texts"),
    "chat without a template": (["w1"], {"chat": True}, r"has no chat template; use --no-chat"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(model, case):
    prompts, options, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as error:
        model.generate(prompts, **options)
    assert "\n" not in str(error.value)


def test_refused_before_weights_are_read(load):
    model = load(lazy=True)
    with pytest.raises(UserError, match="max_new_tokens=-1"):
        model.generate([[1]], max_new_tokens=-1)
    with pytest.raises(UserError, match="prompt 1 has no tokens"):
        model.check_request([[]])
    assert model.load_seconds == 0  # nothing was read
    model.check_request([[1] * (CONTEXT - 1)])


def test_logits_of_no_token_are_refused(model):
    with pytest.raises(UserError, match=rf"0 tokens; allowed: 1 to {CONTEXT}"):
        model.next_token_logits([])
    with pytest.raises(UserError, match=rf"{CONTEXT + 1} tokens; allowed: 1 to {CONTEXT}"):
        model.next_token_logits([1] * (CONTEXT + 1))
