"""The default model's real weights on real text, against transformers reading the same directory."""

import inspect
import textwrap

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from sv_jax.checkpoints import resolve  # noqa: E402
from tests.parity.reference import load, reference_logits, stepped_logits, whole_logits  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.real]


def test_logits_of_512_tokens_of_code(record_property):
    checkpoint = resolve("smollm2-135m", progress=False)
    tokens = np.array(checkpoint.tokenizer().encode(inspect.getsource(textwrap))[:512], np.int32)
    assert len(tokens) == 512
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype="float32").eval()
    expected = reference_logits(model, tokens)
    del model
    target, params = load(checkpoint.directory)
    stepped, first = stepped_logits(target, params, tokens, chunk=128)
    for ours in (whole_logits(target, params, tokens), stepped):
        difference = np.abs(ours - expected).max()
        record_property("max_logit_difference", float(difference))
        print(f"SmolLM2-135M: max logit difference {difference:.1e}, logits to {np.abs(expected).max():.0f}")
        assert difference <= 1e-3
        np.testing.assert_array_equal(ours.argmax(-1), expected.argmax(-1))
    assert first == expected[-1].argmax()
