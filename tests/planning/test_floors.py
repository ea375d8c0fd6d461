"""What a step reads and multiplies: as runs count it afterwards, and worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax import sharding
from sv_jax.drafts.none import NoDraft
from sv_jax.engine.ffn_reads import count_ffn_reads
from sv_jax.engine.trace import RowTrace, count_reads
from sv_jax.planning.floors import Part, expected_experts, expert_work, make_step, read_positions
from sv_jax.planning.footprint import weights_by_kind
from sv_jax.planning.hardware import PLATFORMS
from sv_jax.sparsity.config import SparsityConfig
from sv_jax.sparsity.ffn_config import ChannelSparsity, ExpertSparsity
from sv_jax.sparsity.plan import make_plan
from sv_jax.sparsity.selection import budget_tokens, count_blocks, oldest_visible, select_blocks
from tests.planning.deployments import BIASED, MOE, deploy
from tests.planning.test_footprint import LLAMA, QWEN, real
from tests.tiny import TINY, attention_plan, decode, make_model, random_prompts, replace


def parts_of(step):
    return {part.name: part for part in step.parts}


@pytest.mark.parametrize("length", [1, 63, 100, 128, 200, 1000])
@pytest.mark.parametrize(
    "attention",
    [
        {"l0": 0, "keep": 0.25},
        {"l0": 64, "rho": 0.1},
        {"l0": 32, "rho": 0.7, "sink_blocks": 3, "local_blocks": 4},
        {"l0": 0, "rho": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 89])
def test_positions_are_those_of_a_selection(length, attention, window):
    plan = attention_plan(TINY, **attention).attention
    lengths = jnp.array([length], jnp.int32)
    most = plan.most_blocks(1024)
    _, counts = select_blocks(
        jnp.zeros((1, 1, 1024 // 16)),
        oldest_visible(lengths, window) // 16,
        count_blocks(lengths, 16),
        count_blocks(budget_tokens(lengths, plan.l0, plan.rho), 16),
        most=most,
        sink_blocks=plan.sink_blocks,
        local_blocks=plan.local_blocks,
    )
    assert read_positions(plan, window, 0, length) == int(counts[0, 0]) * 16


def test_dense_layers_and_windows_read_what_they_see():
    plan = attention_plan(TINY, l0=0, keep=0.25, dense_layers=(1,)).attention
    assert read_positions(None, None, 0, 100) == 100
    assert read_positions(None, 40, 0, 100) == 39, "the root is one of the 40"
    assert read_positions(plan, None, 1, 100) == 112, "whole blocks"
    assert read_positions(plan, None, 0, 100) == 48


def traces(state, lengths):
    whole = RowTrace.read(state.trace)
    return [whole[row, n : n + 2] for row, n in enumerate(lengths)]  # the prefill's token, and a step's


@pytest.mark.parametrize("score", ["mass", "bound"])
def test_cache_reads_are_those_that_a_run_counts(score):
    config = replace(TINY, num_layers=3)
    plan = attention_plan(config, l0=0, keep=0.3, score=score, anchors=(0,), dense_layers=(2,))
    prompts = random_prompts((100,))
    _, state = decode(*make_model(config), NoDraft(), prompts, new_tokens=2, sparsity=plan)
    counted = count_reads(traces(state, [100]), [100], plan.attention, config, "float32")
    assert counted.row_steps == counted.sparse_row_steps == 1
    deployment = deploy(config, max_model_len=100, batch_size=1, dtype="float32", sparsity=plan)
    sparse, dense = (parts_of(make_step(deployment, "sparse", 1, p)) for p in (plan, None))
    assert sparse["K/V cache"].bytes == counted.kv_bytes
    assert sparse["block summaries"].bytes == counted.summary_bytes
    assert dense["K/V cache"].bytes == counted.dense_bytes > counted.kv_bytes
    assert "block summaries" not in dense


def test_weight_reads_are_those_that_a_run_counts():
    """One token wakes k experts, whatever the router: there the expectation is exact."""
    config = replace(MOE, qk_norm=None)
    channels = ChannelSparsity("shared", keep=0.5)
    plan = make_plan(SparsityConfig(None, channels, ExpertSparsity(experts_per_token=1)), config)
    _, state = decode(*make_model(config), NoDraft(), random_prompts((20,)), new_tokens=2, sparsity=plan)
    counted = count_ffn_reads(traces(state, [20]), plan, config, "float32", 1)
    assert counted.steps == counted.sparse_steps == 1
    deployment = deploy(config, batch_size=1, dtype="float32", sparsity=plan)
    gate = 2 * config.hidden_size * 4  # of shared experts, which runs do not count
    for chosen, size in ((plan, counted.weight_bytes), (None, counted.dense_weight_bytes)):
        parts = parts_of(make_step(deployment, "sparse", 1, chosen))
        assert parts["feed-forward"].bytes + parts["experts"].bytes - gate == pytest.approx(size, rel=1e-9)


def test_a_context_within_l0_is_read_densely():
    plan = attention_plan(TINY, l0=200, rho=0.1)
    deployment = deploy(sparsity=plan)
    assert make_step(deployment, "sparse", 8, plan).parts == make_step(deployment, "dense", 8).parts
    beyond = deploy(sparsity=plan, max_model_len=256)
    assert make_step(beyond, "sparse", 8, plan).total.bytes < make_step(beyond, "dense", 8).total.bytes


def test_llama_by_hand():
    """One chip of 1x1: everything but the rows of the embedding, and K and V of 32768 tokens."""
    deployment = real(LLAMA, batch_size=2, platform="tpu:v5p")
    step, wide = make_step(deployment, "dense", 1), make_step(deployment, "dense", 8)
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert step.total.bytes == 2 * (8_030_261_248 - 128256 * 4096) + 2 * 131072 * 32768
    over_cache = 2 * 4 * 32 * 32 * 128 * (32768 + 1)  # two rows, 32 layers of 32 heads of 128
    assert step.total.flops == 2 * 2 * matrices + over_cache
    assert wide.total.bytes == step.total.bytes
    assert parts_of(wide)["feed-forward"].flops == 8 * parts_of(step)["feed-forward"].flops
    assert step.experts_per_layer is None
    assert step.total.floor_ms(deployment.chip) == pytest.approx(step.total.bytes / 2765e9 * 1e3)


def test_llama_sparse_by_hand():
    plan = make_plan(SparsityConfig(), real(LLAMA).config)  # the paper's: 4096, and a tenth of the rest
    parts = parts_of(make_step(real(LLAMA, (4, 2), platform="tpu:v5e", batch_size=4), "sparse", 8, plan))
    blocks = -(-(4096 + 2867) // 64)
    assert parts["K/V cache"].bytes == 131072 / 2 * blocks * 64
    means = 32768 // 16  # of 16 keys each, float32
    assert parts["block summaries"].bytes == 32 * 4 * means * 128 * 4


def test_half_the_heads_and_rows_on_each_chip():
    alone, shared = (parts_of(make_step(deploy(mesh=mesh), "dense", 8)) for mesh in ((1, 1), (2, 2)))
    for name in ("K/V cache", "attention weights", "feed-forward", "head"):
        assert alone[name].flops == 4 * shared[name].flops, name
    assert alone["K/V cache"].bytes == 4 * shared["K/V cache"].bytes
    assert alone["feed-forward"].bytes == 2 * shared["feed-forward"].bytes
    assert alone["norms"].bytes == shared["norms"].bytes


def test_who_asks_the_summaries():
    """Of the scores, mass alone asks for all tokens and heads; others for the root, heads averaged."""
    vectors = {"mass": 16 // 16, "mean": 1, "bound": 2}  # of a block of 16
    for score, count in vectors.items():
        plan = attention_plan(TINY, l0=0, keep=0.5, score=score, anchors=(0,))
        parts = parts_of(make_step(deploy(batch_size=1, max_model_len=160), "sparse", 8, plan))
        asking = 8 * TINY.num_heads if score == "mass" else TINY.num_kv_heads
        assert parts["block summaries"].flops == 2 * asking * TINY.head_dim * 10 * count, score
        assert parts["block summaries"].bytes == 10 * count * TINY.num_kv_heads * TINY.head_dim * 4, score


def test_biases_are_read_and_not_multiplied():
    plain = replace(BIASED, attention_bias=False, attention_output_bias=False, mlp_bias=False)
    with_biases, without = (parts_of(make_step(deploy(c), "dense", 8)) for c in (BIASED, plain))
    for name in ("attention weights", "feed-forward"):
        assert with_biases[name].flops == without[name].flops
        assert with_biases[name].bytes > without[name].bytes


def test_tied_embeddings_are_read_as_the_head():
    parts = parts_of(make_step(deploy(TINY), "dense", 1))
    assert parts["head"].bytes == 2 * TINY.vocab_size * TINY.hidden_size
    assert parts["head"].flops == 4 * 2 * TINY.vocab_size * TINY.hidden_size


def test_padded_lanes_are_read_too():
    config = replace(TINY, head_dim=64, num_heads=1, num_kv_heads=1)
    on = {p: parts_of(make_step(deploy(config, platform=p), "dense", 1)) for p in ("tpu:v5e", "gpu:h100")}
    assert on["tpu:v5e"]["K/V cache"].bytes == 2 * on["gpu:h100"]["K/V cache"].bytes


# Experts.


def test_expected_experts():
    assert expected_experts(128, 8, 1) == 8
    assert expected_experts(128, 8, 8) == pytest.approx(128 * (1 - (120 / 128) ** 8))
    assert expected_experts(128, 8, 10**6) == pytest.approx(128)
    assert expected_experts(4, 4, 1) == 4 and expected_experts(4, 9, 1) == 4


def test_expected_experts_against_draws():
    rng = np.random.default_rng(0)
    woken = [len({e for _ in range(5) for e in rng.choice(16, 2, replace=False)}) for _ in range(4000)]
    assert np.mean(woken) == pytest.approx(expected_experts(16, 2, 5), rel=0.01)


def test_qwen_by_hand():
    step = make_step(real(QWEN, (1, 8), batch_size=1), "dense", 1)
    assert step.experts_per_layer == 1, "8 experts on 8 chips"
    assert parts_of(step)["experts"].bytes == 48 * 3 * 2048 * 768 * 2
    assert parts_of(step)["experts"].flops == 2 * 48 * 3 * 2048 * 768
    assert parts_of(step)["router"].bytes == 48 * 2048 * 128 * 4
    assert parts_of(step)["K/V cache"].bytes == 98304 * 32768, "whole on each chip"


def test_which_tokens_meet_a_chips_experts(monkeypatch):
    over_model = deploy(MOE, (2, 2))  # two rows of 8 tokens, four of eight experts
    assert expert_work(over_model, 8, None).read == pytest.approx(4 * (1 - 0.75**16))
    assert expert_work(deploy(TINY), 8, None) is None
    monkeypatch.setitem(sharding.LOGICAL_AXES, "experts", ("data", "model"))
    over_all = deploy(MOE, (2, 2))
    assert expert_work(over_all, 8, None).read == pytest.approx(2 * (1 - 0.75**32)), "all rows' tokens"
    pairs = 4 * 8 * 2 / 4
    flops = 2 * 2 * pairs * 3 * MOE.hidden_size * MOE.moe.expert_size
    assert parts_of(make_step(over_all, "dense", 8))["experts"].flops == flops


AWAKE = 8 * (1 - 0.75**32)  # of 8 experts, by 32 tokens with two each


@pytest.mark.parametrize(
    ("experts", "read", "pairs"),
    [
        ({"experts_per_token": 1}, 8 * (1 - (7 / 8) ** 32), 32),
        ({"shortlist": 3}, 3, 64 * 3 / AWAKE),
        ({"shortlist": 3, "outside": "repick"}, 3 * (1 - (1 / 3) ** 32), 64),
        ({"shortlist": 1, "outside": "repick"}, 1, 32),
        ({"shortlist": 8}, AWAKE, 64),
        ({"max_skipped": 1, "betas": ((0.5,), (0.5,))}, AWAKE, 64),
        ({"capacity_factor": 0.5}, AWAKE, 32),
        ({"capacity_factor": 2.0}, AWAKE, 64),
    ],
    ids=str,
)
def test_experts_that_are_left_out(experts, read, pairs):
    plan = make_plan(SparsityConfig(None, None, ExpertSparsity(**experts)), MOE)
    work = expert_work(deploy(MOE), 8, plan)
    assert (work.read, work.pairs) == pytest.approx((read, pairs))


# Channels.


@pytest.mark.parametrize("mesh", [(1, 1), (1, 2)])
def test_only_shared_channels_save_bytes(mesh):
    deployment = deploy(TINY, mesh)
    dense = parts_of(make_step(deployment, "dense", 8))["feed-forward"]
    for rule, settings in (("gate", {"thresholds": (0.5,)}), ("shared", {"keep": 0.3, "dense_layers": (0,)})):
        plan = make_plan(SparsityConfig(None, ChannelSparsity(rule, **settings)), TINY)
        part = parts_of(make_step(deployment, "sparse", 8, plan))["feed-forward"]
        if rule == "gate":
            assert part == dense
            continue
        here = TINY.intermediate_size // mesh[1]
        left_out = 2 * (here - -(-3 * here // 10)) * TINY.hidden_size  # of up and of down, in one layer
        assert part.bytes == dense.bytes - 2 * left_out
        assert part.flops == dense.flops - 2 * left_out * 4 * 8


# Time.


def test_a_floor_is_the_slower_of_reading_and_multiplying():
    chip = PLATFORMS["tpu:v5e"]
    assert Part("x", 819e6).floor_ms(chip) == pytest.approx(1)
    assert Part("x", 819e6, 394e9).floor_ms(chip) == pytest.approx(2)


def test_the_total_is_no_more_than_its_parts():
    # 8 rows of 40 tokens on a chip: 320 FLOPs for each byte of weights, and 160 for each byte of K and V.
    deployment = real(LLAMA, (4, 2), platform="tpu:v5e", batch_size=32)
    step = make_step(deployment, "dense", 40)
    parts = [part.floor_ms(deployment.chip) for part in step.parts]
    total = step.total.floor_ms(deployment.chip)
    assert max(parts) < total < sum(parts), "some parts are bound by bytes, others by FLOPs"
    assert weights_by_kind(deployment)["feed-forward"].bytes == parts_of(step)["feed-forward"].bytes
