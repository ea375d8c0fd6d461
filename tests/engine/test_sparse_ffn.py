"""generate(sparsity=...) with channels left out: what its statistics and its last line say."""

from __future__ import annotations

import json

import pytest

from sv_jax import SamplingParams, SparsityConfig
from sv_jax.config import UserError
from sv_jax.sampling_params import GREEDY
from sv_jax.sparsity.ffn_config import ChannelSparsity, ExpertSparsity
from sv_jax.summary import law_line, summary_lines
from tests.engine.tiny_directory import random_prompts

K = 4
PROMPTS = random_prompts(9, 130, 3)


def sparse(**ffn) -> SparsityConfig:
    return SparsityConfig(None, ChannelSparsity(**ffn))


def ids_of(result):
    return [output.token_ids for output in result.outputs]


@pytest.mark.parametrize("k", [K, "auto"])
def test_all_channels_kept(model, k):
    options = {"max_new_tokens": 20, "num_speculative_tokens": k}
    result = model.generate(PROMPTS, sparsity=sparse(thresholds=[0.0]), **options)
    assert ids_of(result) == ids_of(model.generate(PROMPTS, **options))
    reads = result.stats.sparse_ffn
    assert reads.sparse_steps == 0 < reads.steps == result.stats.verify_steps
    assert reads.bytes_per_token == reads.dense_bytes_per_token and reads.experts_per_token is None
    assert reads.channel_density == reads.channel_union == 1 and result.stats.sparse_attention is None
    assert "no step left anything out, so the output equals" in summary_lines(result.stats.as_dict(), 3)[-1]


def test_a_budget(model):
    """Half of up's and down's channels, all of gate's: two thirds of the bytes, by step and by token."""
    size, width = model.checkpoint.config.intermediate_size, model.checkpoint.config.hidden_size
    options = {"max_new_tokens": 20, "num_speculative_tokens": K, "ignore_eos": True}
    result = model.generate(PROMPTS, sparsity=sparse(rule="shared", keep=0.5), **options)
    reads, emitted = result.stats.sparse_ffn, 3 * 19
    assert reads.sparse_steps == reads.steps and reads.channel_density == 0.5
    per_step = (size + 2 * size // 2) * width * 4
    assert reads.bytes_per_token == pytest.approx(reads.steps * per_step / emitted)
    assert reads.bytes_per_token * 3 == pytest.approx(reads.dense_bytes_per_token * 2)
    assert ids_of(result) != ids_of(model.generate(PROMPTS, **options))
    lines = summary_lines(json.loads(json.dumps(result.stats.as_dict())), 3)
    assert any(line.startswith("FFN reads") and "MB of weights per token; dense" in line for line in lines)
    assert any("50 % used by a token, 50 % by the tokens of a step" in line for line in lines)
    assert (
        f"{reads.steps} of {reads.steps} steps (100 %) left a part of the feed-forward weights" in lines[-1]
    )
    assert "lossy" in lines[-1]


def test_both_losses_are_told():
    attention = {"sparse_row_steps": 1, "row_steps": 4}
    ffn = {"sparse_steps": 3, "steps": 4}
    line = law_line(GREEDY, attention, ffn)
    assert "1 of 4 row-steps (25 %) left a part of the cache out, 3 of 4 steps (75 %) left a part of" in line
    ffn["sparse_steps"] = 0
    assert "feed-forward" not in law_line(GREEDY, attention, ffn)
    attention["sparse_row_steps"] = 0
    assert "no step left anything out, so the output follows the law" in law_line(
        SamplingParams(temperature=1.0), attention, ffn
    )


def test_what_does_not_fit_is_refused_before_weights_are_read(load):
    lazy = load(lazy=True)
    experts = SparsityConfig(None, None, ExpertSparsity(shortlist=2))
    with pytest.raises(UserError, match="experts are to be left out; this llama model has none"):
        lazy.check_request([[1]], sparsity=experts)
    with pytest.raises(UserError, match="ffn thresholds has 7 numbers; allowed for this model: 1, or 1"):
        lazy.check_request([[1]], sparsity=sparse(thresholds=[0.1] * 7))
    with pytest.raises(UserError, match="ffn dense-layers has layer 5; allowed for this model: 0 to 0"):
        lazy.check_request([[1]], sparsity=sparse(thresholds=[0.1], dense_layers=(5,)))
    assert lazy._params is None
