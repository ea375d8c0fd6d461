"""generate(sparsity=...): what it emits where nothing is left out, and its reads, counted by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from sv_jax import AttentionSparsity, SamplingParams, SparsityConfig
from sv_jax.config import UserError
from sv_jax.engine import LanguageModel, decoding
from sv_jax.engine.settings import Settings
from sv_jax.engine.trace import ReadCounts, RowTrace, count_reads
from sv_jax.sparsity.plan import make_plan
from tests.engine.tiny_directory import CONTEXT, assert_greedy, random_prompts
from tests.tiny import TINY

K = 4
HEADS, HEAD_DIM = 2, 8  # KV heads of the one layer
POSITION = 2 * HEAD_DIM * 4  # bytes of a position's K and V in a KV head, float32
PROMPTS = random_prompts(9, 130, 3, 300, 60)


def sparse(**attention) -> SparsityConfig:
    return SparsityConfig(AttentionSparsity(**({"block_size": 16} | attention)))


def ids_of(result):
    return [output.token_ids for output in result.outputs]


@pytest.fixture
def slices(monkeypatch):
    """(bucket, whether it verified sparsely) of each slice."""
    seen = []
    run = decoding.decode_slice

    def record(*arguments, sparsity, **options):
        state = run(*arguments, sparsity=sparsity, **options)
        seen.append((state.cache.capacity, sparsity is not None))
        return state

    monkeypatch.setattr(decoding, "decode_slice", record)
    return seen


HOW = {
    "K": {"num_speculative_tokens": K},
    "auto": {"num_speculative_tokens": "auto"},
    "groups": {"num_speculative_tokens": K, "max_batch_size": 2},
    "sampled": {
        "num_speculative_tokens": K,
        "sampling": [SamplingParams(temperature=0.6, seed=i) for i in range(5)],
    },
}


@pytest.mark.parametrize("how, score", [*((how, "mean") for how in HOW), ("K", "bound")])
def test_a_budget_of_everything_leaves_nothing_out(model, how, score, slices):
    options = {"max_new_tokens": 20, **HOW[how]}
    dense = model.generate(PROMPTS, **options)
    assert not any(was_sparse for _, was_sparse in slices) and dense.stats.sparse_attention is None
    slices.clear()
    result = model.generate(PROMPTS, sparsity=sparse(keep=1.0, score=score), **options)
    assert ids_of(result) == ids_of(dense)
    assert slices and all(was_sparse for _, was_sparse in slices)
    reads = result.stats.sparse_attention
    assert reads.sparse_row_steps == 0
    assert reads.row_steps == sum(result.stats.acceptance_histogram)
    assert reads.kv_blocks_per_token == reads.dense_kv_blocks_per_token > 0
    # The last blocks are read whole, and the others' summaries beside them.
    assert reads.bytes_per_token > reads.summary_bytes_per_token + reads.dense_bytes_per_token


def test_a_budget_of_everything_on_a_mesh(load, model):
    options = {"max_new_tokens": 12, "num_speculative_tokens": K}
    expected = ids_of(model.generate(PROMPTS, **options))
    result = load(mesh=(2, 2)).generate(PROMPTS, sparsity=sparse(keep=1.0), **options)
    assert ids_of(result) == expected


@pytest.mark.parametrize("how", ["K", "auto"])
def test_a_context_within_l0_runs_in_the_dense_program(model, how, slices):
    options = {"max_new_tokens": 20, **HOW[how]}
    dense = model.generate(PROMPTS, **options)
    result = model.generate(PROMPTS, sparsity=sparse(l0=CONTEXT * 2), **options)
    assert ids_of(result) == ids_of(dense)
    assert not any(was_sparse for _, was_sparse in slices)
    reads = result.stats.sparse_attention
    assert (reads.sparse_row_steps, reads.summary_bytes_per_token) == (0, 0)
    assert reads.bytes_per_token == reads.dense_bytes_per_token > 0
    assert reads.kv_blocks_per_token == reads.dense_kv_blocks_per_token


def test_a_cache_that_outgrows_l0(model, slices):
    """Dense in the bucket of 512; beyond, rows within l0 still lose nothing."""
    prompts = random_prompts(500, 20)
    options = {"max_new_tokens": 40, "num_speculative_tokens": K}
    dense = model.generate(prompts, **options)
    slices.clear()
    result = model.generate(prompts, sparsity=sparse(l0=512, rho=0.0), **options)
    assert {entry for entry in slices} == {(512, False), (1024, True)}
    assert slices == sorted(slices)
    assert ids_of(result)[1] == ids_of(dense)[1]
    assert ids_of(result)[0][:12] == ids_of(dense)[0][:12]  # written at positions up to 512
    assert 0 < result.stats.sparse_attention.sparse_row_steps < result.stats.sparse_attention.row_steps


def test_reads_of_plain_steps_by_hand(model):
    """From 100 tokens, 4 steps: L = 100 .. 103, 7 blocks of 16, of which a quarter is 2, and sinks and local
    blocks are 3."""
    (prompt,) = random_prompts(100)
    result = model.generate([prompt], max_new_tokens=5, draft_method="none", sparsity=sparse(keep=0.25))
    reads = result.stats.sparse_attention
    assert (reads.row_steps, reads.sparse_row_steps) == (4, 4)
    assert reads.kv_blocks_per_token == 3 * HEADS
    assert reads.dense_kv_blocks_per_token == 7 * HEADS
    summaries = 7 * HEADS * HEAD_DIM * 4
    assert reads.summary_bytes_per_token == summaries
    assert reads.bytes_per_token == 3 * HEADS * 16 * POSITION + summaries
    assert reads.dense_bytes_per_token == (100 + 101 + 102 + 103) / 4 * HEADS * POSITION
    assert_greedy(prompt, result.outputs[0].token_ids[:1])  # the prefill's, which is dense


@pytest.mark.parametrize("how", HOW)
def test_a_small_budget_reads_less_and_may_write_something_else(model, how):
    prompts = [p * 3 for p in PROMPTS]
    options = {"max_new_tokens": 20, **HOW[how]}
    result = model.generate(prompts, sparsity=sparse(keep=0.05, local_blocks=1), **options)
    assert [len(ids) for ids in ids_of(result)] == [20] * 5
    reads = result.stats.sparse_attention
    assert 0 < reads.sparse_row_steps < reads.row_steps  # the shortest rows are all sinks and local blocks
    assert reads.kv_blocks_per_token < 0.5 * reads.dense_kv_blocks_per_token
    assert ids_of(result) != ids_of(model.generate(prompts, **options))
    assert json.loads(json.dumps(result.stats.as_dict()))["sparse_attention"] == dataclasses.asdict(reads)


def test_tokens_behind_a_stop_string_are_not_counted(model):
    (prompt,) = random_prompts(100)
    options = {"max_new_tokens": 30, "draft_method": "none", "sparsity": sparse(keep=0.25)}
    ids = model.generate([prompt], **options).outputs[0].token_ids
    count = next(n for n in range(5, 30) if ids[n] not in ids[:n]) + 1
    result = model.generate([prompt], stop=[f"w{ids[count - 1]}"], **options)
    kept = len(result.outputs[0].token_ids)
    assert kept <= count and result.stats.sparse_attention.row_steps == kept - 1


def test_an_interrupted_run_counts_what_it_has(model):
    calls = []
    config = sparse(keep=0.25)

    def stop_at(call):
        calls.clear()
        return lambda: calls.append(0) or len(calls) >= call

    early = model.generate(PROMPTS, sparsity=config, should_stop=stop_at(1))
    assert early.interrupted
    reads = early.stats.sparse_attention
    assert (reads.row_steps, reads.sparse_row_steps, reads.bytes_per_token) == (0, 0, None)
    result = model.generate(PROMPTS, sparsity=config, should_stop=stop_at(4), num_speculative_tokens=K)
    assert result.interrupted
    reads = result.stats.sparse_attention
    assert 0 < reads.row_steps == sum(result.stats.acceptance_histogram)


def test_chat(load, tmp_path):
    plain = load()
    (plain.checkpoint.directory / "chat_template.jinja").write_text(
        "{% for message in messages %}w1 {{ message.content }} w2{% endfor %}"
    )
    model = LanguageModel("chat", plain.checkpoint, plain.sharding, dtype="float32", progress=False)
    assert model.encode_prompt("w5 w6") == [1, 5, 6, 2]
    texts = [" ".join(f"w{i}" for i in prompt) for prompt in PROMPTS]
    options = {"max_new_tokens": 12, "num_speculative_tokens": "auto"}
    expected = model.generate(texts, **options)
    assert ids_of(model.generate(texts, sparsity=sparse(keep=1.0), **options)) == ids_of(expected)
    told = []
    result = model.generate(
        texts,
        sparsity=sparse(keep=0.2),
        on_text=lambda row, text, reason: told.append((row, text)),
        **options,
    )
    for row, output in enumerate(result.outputs):
        assert "".join(text for i, text in told if i == row) == output.text != ""


def test_the_comparison_is_with_dense_steps(model, slices):
    options = {"max_new_tokens": 20, "num_speculative_tokens": K}
    prompts = [p * 3 for p in PROMPTS]
    result = model.generate(prompts, sparsity=sparse(keep=0.05, local_blocks=1), **options)
    slices.clear()
    report = model.compare_with_plain(result, prompts)
    assert slices and not any(was_sparse for _, was_sparse in slices)
    assert report.identical_rows < 5 and not report.lossless  # a model of random weights has no near-ties
    whole = model.generate(prompts, sparsity=sparse(keep=1.0), **options)
    assert model.compare_with_plain(whole, prompts).identical_rows == 5


def test_costs_of_other_verifications_are_kept_apart(model):
    """And a provenance, which may have lists and tables, plays no part in that."""
    told = dataclasses.replace(sparse(keep=0.5), provenance=(("texts", ["a", "b"]), ("more", {"x": 1})))
    none, half, again, less = (
        model._length(Settings(num_speculative_tokens="auto", sparsity=sparsity), 3)
        for sparsity in (None, sparse(keep=0.5), told, sparse(keep=0.4))
    )
    assert half is again and len({id(length) for length in (none, half, less)}) == 3


REFUSED = {
    "layers": (sparse(anchors=(0, 1)), "anchors has layer 1; allowed for this model: 0 to 0"),
    "dense layers": (sparse(dense_layers=(7,)), "dense-layers has layer 7; allowed for this model: 0 to 0"),
    "no anchor": (sparse(anchors=()), "layer 0 has no anchor before it"),
    "attention alone": (AttentionSparsity(), r"sparsity=AttentionSparsity\(.*; allowed: a SparsityConfig"),
    "words": ("sparse", "sparsity='sparse'; allowed: a SparsityConfig, or None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_weights_are_read(load, case):
    sparsity, message = REFUSED[case]
    model = load(lazy=True)
    with pytest.raises(UserError, match=message):
        model.check_request([[1]], sparsity=sparsity)
    with pytest.raises(UserError, match=message):
        model.generate([[1]], sparsity=sparsity)
    assert model.load_seconds == 0


def trace(*steps: tuple[int, int, int]) -> RowTrace:
    """A row whose first token is its prefill's; then (number of the step, tokens it emitted, KV blocks)."""
    number = [0, *(n for n, count, _ in steps for _ in range(count))]
    blocks = [0, *(read for _, count, read in steps for _ in range(count))]
    nothing = np.zeros(len(number), np.int32)
    return RowTrace(
        step=np.array(number, np.int32),
        drafted=nothing,
        proposed=nothing,
        foreseen=nothing.astype(bool),
        kv_blocks=np.array(blocks, np.int32),
    )


def counted(*rows, model=TINY, dtype="float32", **attention) -> ReadCounts:
    """Of rows (prompt length, trace)."""
    plan = make_plan(sparse(**attention), model).attention
    return count_reads([row for _, row in rows], [length for length, _ in rows], plan, model, dtype)


def test_counts_by_hand():
    """TINY: 2 layers, 2 KV heads, 8 channels; blocks of 16."""
    held = {100: 7 * 4, 103: 7 * 4, 40: 3 * 4}
    first = trace((1, 3, 12), (2, 1, held[103]))  # L = 100 with 3 tokens kept, then 103, everything read
    second = trace((2, 2, 0))  # L = 40, in the dense program
    position, summary = 2 * 8 * 4, 4 * 8 * 4
    assert counted((100, first), (40, second)) == ReadCounts(
        tokens=6,
        row_steps=3,
        sparse_row_steps=1,
        kv_blocks=12 + held[103] + held[40],
        dense_kv_blocks=held[100] + held[103] + held[40],
        kv_bytes=((12 + held[103]) * 16 + 40 * 4) * position,
        summary_bytes=2 * 7 * summary,
        dense_bytes=(100 + 103 + 40) * 4 * position,
    )
    assert counted((100, first), dtype="bfloat16").kv_bytes == (12 + held[103]) * 16 * position // 2
    assert counted((100, first), anchors=(0,)).summary_bytes == 7 * summary  # one of two layers scores
    assert counted((100, first), score="bound").summary_bytes == 2 * 2 * 7 * summary
    assert counted((100, first.cut(2))).tokens == 1  # an end inside of a step


def test_counts_of_nothing():
    nothing = ReadCounts(*[0] * 8)
    assert counted((100, trace())) == nothing
    assert counted((100, trace().cut(0)), (1, trace())) == nothing
    assert nothing + nothing == nothing


def test_blocks_before_a_window_are_not_missed():
    """A window of 33 sees 32 positions before the root: of L = 100 those from 68 on, blocks 4, 5 and 6."""
    model = dataclasses.replace(TINY, sliding_windows=(None, 33))
    all_there_is = trace((1, 1, 2 * (7 + 3)))
    counts = counted((100, all_there_is), model=model)
    assert (counts.sparse_row_steps, counts.kv_blocks, counts.dense_kv_blocks) == (0, 20, 20)
    assert counts.dense_bytes == 2 * (100 + 32) * 2 * 8 * 4
    assert counted((100, trace((1, 1, 19))), model=model).sparse_row_steps == 1
    # Where the layer reads everything its blocks before the window are read, too.
    counts = counted((100, trace((1, 1, 2 * (7 + 7)))), model=model, anchors=(0,), dense_layers=(1,))
    assert (counts.sparse_row_steps, counts.dense_kv_blocks) == (0, 28)
    # A context within the window.
    counts = counted((20, trace((1, 1, 2 * (2 + 2)))), model=model)
    assert (counts.sparse_row_steps, counts.dense_bytes) == (0, 2 * 40 * 2 * 8 * 4)
