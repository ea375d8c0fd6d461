"""Bytes of a chip: what emulated devices really hold, and figures worked out by hand."""

import dataclasses

import jax
import pytest

from sv_jax import sharding
from sv_jax.checkpoints.config_alone import find_config
from sv_jax.config import UserError
from sv_jax.engine.decoding import ensure_capacity
from sv_jax.model.transformer import abstract_params, random_params
from sv_jax.planning.footprint import (
    logits_bytes,
    make_footprint,
    other_temporaries,
    shapes_that_fit,
    state_bytes,
    weights_by_kind,
)
from sv_jax.planning.hardware import GIB
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig
from sv_jax.sparsity.ffn_config import ChannelSparsity, ExpertSparsity
from sv_jax.sparsity.plan import make_plan
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import start_state
from tests.planning.deployments import BIASED, MOE, ODD, bytes_on_a_device, deploy
from tests.tiny import TINY, make_target, replace

LLAMA, QWEN = "llama-3.1-8b", "qwen3-30b-a3b"
MESHES = [(1, 1), (2, 1), (1, 2), (4, 2)]
CONFIGS = {"tied": TINY, "nothing divides": ODD, "biases": BIASED, "experts": MOE}


def real(name, mesh=(1, 1), **changes):
    """A packaged config, deployed."""
    return deploy(find_config(name)[0], mesh, **{"name": name, "max_model_len": 32768} | changes)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_the_parameters_on_a_device(name, mesh):
    weights = weights_by_kind(deploy(CONFIGS[name], mesh))
    leaves = jax.tree.leaves(abstract_params(make_target(CONFIGS[name], mesh, "bfloat16")))
    shards = [jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves]
    assert sum(part.bytes for part in weights.values()) == sum(s.size * s.dtype.itemsize for s in shards)
    assert sum(part.parameters for part in weights.values()) == sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_what_devices_hold(name):
    held = bytes_on_a_device(random_params(make_target(CONFIGS[name], (4, 2), "bfloat16")))
    assert sum(part.bytes for part in weights_by_kind(deploy(CONFIGS[name], (4, 2))).values()) == held


def test_kinds():
    d, f, layers = MOE.hidden_size, 16, 2  # with experts
    weights = weights_by_kind(deploy(MOE, (1, 2)))
    assert weights["experts"].parameters == layers * 8 * 3 * d * f
    assert weights["experts"].bytes == 2 * weights["experts"].parameters // 2
    assert weights["router"].bytes == layers * 4 * d * 8, "float32, whole on each"
    assert weights["shared experts"].parameters == layers * (3 * d * 24 + d)
    assert weights["feed-forward"].parameters == 3 * d * MOE.intermediate_size
    assert weights["norms"].parameters == 3 * 2 * d + d + 3 * 2 * MOE.head_dim
    assert weights["embedding"].parameters == weights["head"].parameters == MOE.vocab_size * d
    assert "head" not in weights_by_kind(deploy(TINY))
    assert "experts" not in weights_by_kind(deploy(TINY))


SPARSE = SparsityConfig(
    AttentionSparsity(block_size=16, l0=0, keep=0.5, anchors=(0, 2)),
    ChannelSparsity("gate", thresholds=(0.1,)),
    ExpertSparsity(shortlist=3),
)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_state_is_what_devices_hold(mesh, sparse):
    plan = make_plan(SPARSE, MOE) if sparse else None
    deployment = deploy(MOE, mesh, sparsity=plan, batch_size=3)
    batch = -(-3 // mesh[0]) * mesh[0]
    target, request = make_target(MOE, mesh, "bfloat16"), make_request([1] * batch, [1] * batch)
    state = start_state(target, request, capacity=256, sparsity=plan)
    sizes = state_bytes(deployment, 256)
    assert sum(sizes.values()) == bytes_on_a_device(state)
    assert sizes["K/V cache"] == bytes_on_a_device((state.cache.keys, state.cache.values))
    assert sizes.get("block summaries", 0) == bytes_on_a_device(state.summaries)
    assert ("block summaries" in sizes) == sparse


def test_llama_by_hand():
    d, kv, f, v, layers = 4096, 1024, 14336, 128256, 32
    weights = weights_by_kind(real(LLAMA))
    by_hand = {
        "embedding": v * d,
        "head": v * d,
        "attention": layers * (2 * d * d + 2 * d * kv),
        "feed-forward": layers * 3 * d * f,
        "norms": (2 * layers + 1) * d,
    }
    assert {kind: part.parameters for kind, part in weights.items()} == by_hand
    assert sum(by_hand.values()) == 8_030_261_248, "as its card counts them"
    assert {kind: part.bytes for kind, part in weights.items()} == {k: 2 * n for k, n in by_hand.items()}


def test_llama_on_8_chips_by_hand():
    footprint = make_footprint(real(LLAMA, (4, 2), platform="tpu:v5e"))
    slots = 32768 + 128  # T = 8 more, in a multiple of 128
    assert footprint.resident["K/V cache"] == 131072 // 2 * slots, "one row a chip, half of the KV heads"
    assert footprint.resident["weights: head"] == 128256 * 4096
    assert footprint.step["logits, float32"] == 4 * 8 * 128256 // 2
    assert footprint.available == 15.75 * GIB and footprint.fits
    trace = footprint.growing - 131072 // 2 * 32768  # beside a cache with a bucket of 32k
    assert 0 < trace < 1e6
    assert footprint.needed == sum(footprint.resident.values()) + footprint.growing
    assert footprint.during_steps == sum(footprint.resident.values()) + sum(footprint.step.values())


def test_qwen_by_hand():
    d, f, v, layers, experts = 2048, 768, 151936, 48, 128
    weights = weights_by_kind(real(QWEN, (1, 8)))
    assert weights["experts"].parameters == layers * experts * 3 * d * f
    assert weights["attention"].parameters == layers * (2 * d * 4096 + 2 * d * 512)
    assert weights["embedding"].parameters == v * d
    assert sum(part.parameters for part in weights.values()) == 30_532_122_624, "as its card counts them"
    assert weights["experts"].bytes * 8 == 2 * weights["experts"].parameters
    assert weights["attention"].bytes == 2 * weights["attention"].parameters, "4 KV heads do not divide by 8"
    assert weights["embedding"].bytes * 8 == 2 * v * d


def test_qwen_fits_8_chips_where_its_experts_are_over_all_of_them(monkeypatch):
    over_two = real(QWEN, (4, 2), platform="tpu:v5e", batch_size=1)
    footprint = make_footprint(over_two)
    assert footprint.resident["weights: experts"] == 27 * GIB and not footprint.fits
    assert shapes_that_fit(over_two) == [(1, 8)]
    monkeypatch.setitem(sharding.LOGICAL_AXES, "experts", ("data", "model"))
    footprint = make_footprint(real(QWEN, (4, 2), platform="tpu:v5e", batch_size=1))
    assert footprint.resident["weights: experts"] == 27 * GIB / 4 and footprint.fits


def test_shapes_that_do_not_divide_are_none_that_fit():
    assert shapes_that_fit(deploy(TINY, (4, 2))) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert shapes_that_fit(deploy(replace(TINY, intermediate_size=36), (8, 1))) == [(8, 1), (4, 2), (2, 4)]
    assert shapes_that_fit(deploy(TINY, (3, 1))) == [(3, 1)]


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "platform", "padding"),
    [
        (128, 1, "tpu:v5e", 1),
        (256, 1, "tpu:v5e", 1),
        (64, 2, "tpu:v5e", 1),
        (64, 1, "tpu:v6e", 2),
        (64, 3, "tpu:v5e", 2),
        (96, 4, "tpu:v5p", 1),
        (96, 2, "tpu:v5p", 128 / 96),
        (160, 1, "tpu:v5p", 256 / 160),
        (64, 1, "gpu:h100", 1),
    ],
)
def test_lanes_that_stay_empty(head_dim, kv_heads, platform, padding):
    config = replace(TINY, head_dim=head_dim, num_heads=kv_heads, num_kv_heads=kv_heads)
    deployment = deploy(config, platform=platform)
    assert deployment.kv_padding == padding
    bare = 2 * config.num_layers * 4 * kv_heads * 256 * head_dim * 2
    assert state_bytes(deployment, 256)["K/V cache"] == bare * padding


def test_packing_counts_the_heads_of_a_chip():
    config = replace(TINY, head_dim=64, num_heads=4, num_kv_heads=4)
    assert deploy(config, (1, 2), platform="tpu:v5e").kv_padding == 1
    assert deploy(config, (1, 4), platform="tpu:v5e").kv_padding == 2


def test_narrow_summaries_are_padded_on_tpu():
    plan = make_plan(SparsityConfig(AttentionSparsity(block_size=16, score="mean")), TINY)
    gpu, tpu = (state_bytes(deploy(sparsity=plan, platform=p), 256) for p in ("gpu:h100", "tpu:v5e"))
    assert tpu["block summaries"] == gpu["block summaries"] * 128 // TINY.head_dim


def test_rows_and_buckets():
    deployment = deploy(mesh=(4, 1), batch_size=5, max_model_len=256)
    assert (deployment.padded_batch, deployment.rows) == (8, 2)
    assert (deployment.width, deployment.capacity, deployment.bucket_before) == (8, 384, 0)
    long = deploy(replace(TINY, max_position_embeddings=8000), max_model_len=5000)
    assert (long.capacity, long.bucket_before) == (5120, 4096)
    assert make_footprint(deployment).growing == 0


def test_the_bucket_before_is_the_one_that_grows(monkeypatch):
    """Growing from it gives the last one: the engine's own function."""
    deployment = deploy(replace(TINY, max_position_embeddings=8000), max_model_len=5000)
    seen = []
    monkeypatch.setattr("sv_jax.engine.decoding.grow_state", lambda _, state, capacity: seen.append(capacity))

    class State:
        class cache:
            capacity = deployment.bucket_before

    ensure_capacity(deployment.target, State, deployment.bucket_before + 1, deployment.capacity)  # type: ignore[arg-type]
    assert seen == [deployment.capacity]


def test_temporaries_grow_with_what_they_are_of():
    base = other_temporaries(deploy())
    assert other_temporaries(deploy(batch_size=8)) > base
    assert other_temporaries(deploy(num_speculative_tokens=511)) > 3 * base, "wider than a chunk of prefill"
    assert other_temporaries(deploy(mesh=(4, 1))) < base
    long = [
        deploy(replace(TINY, max_position_embeddings=1 << 20), max_model_len=n) for n in (1 << 18, 1 << 19)
    ]
    short, longer = map(other_temporaries, long)
    assert 1.9 < longer / short < 2.1, "scores over the cache"
    plan = make_plan(SparsityConfig(AttentionSparsity(l0=0, keep=0.5)), long[0].config)
    assert other_temporaries(dataclasses.replace(long[0], sparsity=plan)) > short
    assert logits_bytes(deploy(mesh=(2, 2))) == 4 * 2 * 8 * TINY.vocab_size // 2
    assert logits_bytes(deploy(ODD, mesh=(1, 2))) == 4 * 4 * 8 * 61, "a vocabulary that does not divide"


def test_what_make_sharding_refuses_is_refused():
    for config, mesh in ((TINY, (1, 3)), (replace(MOE, moe=replace(MOE.moe, num_experts=6)), (1, 4))):
        with pytest.raises(UserError) as planned:
            deploy(config, mesh)
        with pytest.raises(UserError) as made:
            sharding.make_sharding(config, mesh)
        assert str(planned.value) == str(made.value) and "does not divide" in str(made.value)


@pytest.mark.parametrize("length", [1, 257])
def test_a_context_that_the_model_does_not_have(length):
    with pytest.raises(UserError, match=rf"^max_model_len={length}; allowed for tiny: 2 to 256$"):
        deploy(max_model_len=length)
