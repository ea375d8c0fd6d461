"""Log-probabilities of emitted tokens: the model's own law, whatever the tokens were picked by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.ahead_of_time import hlo
from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.sampling_params import SamplingParams
from sv_jax.sharding import make_sharding
from sv_jax.speculation.logprobs import top_logits
from tests.drafters import run_script
from tests.plain_decoder import logits_of
from tests.tiny import TINY, decode, make_model, prefilled, random_prompts, replace, row_counts, sequences

NEW, COUNT = 24, 5
# The first row has ended with its prompt's chunk, while the longest prompt is read on; the third only pads.
PROMPTS = [*random_prompts((5, 40)), [], *random_prompts((1,), seed=1)]
COUNTS = [1, NEW, 0, NEW]
SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=0.4, top_k=3, seed=2, presence_penalty=-0.5),
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
]


def log_softmax(logits):
    return np.asarray(jax.nn.log_softmax(logits.astype(np.float64)))


def check(text, prompt_length, emitted, top, top_ids):
    """Against one forward pass over the whole text."""
    expected = log_softmax(logits_of(*make_model(), text))[prompt_length - 1 : -1]
    output = text[prompt_length:]
    places = slice(prompt_length, len(text))
    np.testing.assert_allclose(emitted[places], expected[np.arange(len(output)), output], atol=1e-4)
    best = -np.sort(-expected, axis=-1)[:, :COUNT]
    np.testing.assert_allclose(top[places], best, atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(expected, top_ids[places], axis=-1), best, atol=1e-4)
    assert all(len(set(ids)) == COUNT for ids in top_ids[places].tolist())


def check_rows(texts, state):
    arrays = [np.asarray(x) for x in (state.logprobs.emitted, state.logprobs.top, state.logprobs.top_ids)]
    for row in (0, 1, 3):
        assert len(texts[row]) == len(PROMPTS[row]) + COUNTS[row]
        check(texts[row], len(PROMPTS[row]), *(array[row] for array in arrays))


OPTIONS = {"new_tokens": COUNTS, "sampling": SAMPLING, "num_logprobs": COUNT}


@pytest.mark.parametrize(
    ("mesh", "drafter"),
    [((1, 1), NoDraft()), ((1, 1), PromptLookup(4)), ((2, 2), PromptLookup(4))],
    ids=["1x1 plain", "1x1", "2x2"],
)
def test_every_emitted_token(mesh, drafter):
    texts, state = decode(*make_model(TINY, mesh), drafter, PROMPTS, **OPTIONS)
    check_rows(texts, state)
    accepted = sum(counts.accepted for counts in row_counts(state, 5))
    assert (accepted > 0) == (drafter != NoDraft())


def test_nodes_of_a_tree():
    """Accepted tokens are on another branch than the first in every second step."""
    texts, _ = decode(*make_model(), NoDraft(), PROMPTS, **OPTIONS)
    limits = [len(prompt) + count for prompt, count in zip(PROMPTS, COUNTS)]
    state = prefilled(*make_model(), PROMPTS, limits=limits, sampling=SAMPLING, num_logprobs=COUNT)
    state = run_script(*make_model(), state, texts, (3, 2), num_tokens=6, branches=2)
    assert sequences(state) == texts
    check_rows(texts, state)


@pytest.mark.parametrize("vocab_size", [64, 10, 61])
@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)], ids=["1x1", "2x2"])
def test_top_logits_of_a_sharded_vocabulary(mesh, vocab_size):
    """More alternatives than a shard has, too; 61 does not divide, and is whole on each device."""
    sharding = make_sharding(replace(TINY, vocab_size=vocab_size), mesh)
    logits = np.random.default_rng(0).normal(size=(4, 3, vocab_size)).astype(np.float32)
    placed = jax.device_put(logits, sharding.named("batch", None, "vocab"))
    compiled = jax.jit(lambda x: top_logits(x, 8, sharding)).lower(placed).compile()
    values, ids = compiled(placed)
    expected = jax.lax.top_k(logits, 8)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(ids, expected[1])
    moved = [i for i in hlo.instructions(compiled.as_text()) if i.opcode.startswith(("all-", "collective"))]
    # Of each of two shards of 32 the best 8, of 5 all.
    widths = {dims[-1] for i in moved for _, dims in i.shapes}
    assert widths == ({16 if vocab_size == 64 else 10} if mesh == (2, 2) and vocab_size != 61 else set())


def test_equal_logits_are_told_apart():
    """Ties take the smallest ids, as top_k does; no id comes twice."""
    sharding = make_sharding(TINY, (1, 2))
    _, ids = jax.jit(lambda x: top_logits(x, 8, sharding))(jnp.zeros((1, 1, 64)))
    assert ids[0, 0].tolist() == list(range(8))
