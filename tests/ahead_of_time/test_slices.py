"""Slices of the decoding loop through the TPU's own compiler: which attention, what is copied, what fits.

Few layers with the heads of real models: whole models are compiled by scripts/aot_report.py.
"""

import dataclasses
import functools
import importlib.util
import math

import jax
import pytest

from sv_jax.ahead_of_time.programs import SliceProgram, abstract_state, compile_slice
from sv_jax.ahead_of_time.targets import find_target
from sv_jax.config import Cuts, ModelConfig, MoEConfig, UserError
from sv_jax.model.transformer import Transformer, abstract_params
from sv_jax.sharding import shard_model
from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig
from sv_jax.sparsity.selection import MASS_ROWS
from sv_jax.sparsity.summaries import KEYS_PER_MEAN

SMALL = ModelConfig(
    family="llama",
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=2,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    max_position_embeddings=65536,
)
NARROW = ModelConfig(**{**vars(SMALL), "head_dim": 64, "num_kv_heads": 8})
MOE = ModelConfig(
    **{**vars(SMALL), "family": "qwen3_moe", "qk_norm": "head", "moe": MoEConfig(16, 4, 256, True)}
)
SPARSE = SparsityConfig(AttentionSparsity(keep=0.1, block_size=128, score="mass"))
CAPACITY = 16384


tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no TPU compiler: pip install -e '.[aot]'"
)
cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no CUDA compiler: pip install -e '.[aot]'"
)


def program(config=SMALL, mesh=(4, 2), **options):
    settings = {"batch": 4, "capacity": CAPACITY, "num_speculative_tokens": 15} | options
    return SliceProgram(config, settings.pop("platform", "tpu:v5e"), mesh, **settings)


@functools.cache
def compiled(implementation, sparsity, config=SMALL, *, arrays=False, **options):
    options |= {"implementation": implementation, "sparsity": sparsity}
    return compile_slice(program(config, **options), arrays=arrays)


@tpu
@pytest.mark.parametrize("sparsity", [None, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu", None])
def test_nothing_copies_a_cache(implementation, sparsity):
    result = compiled(implementation, sparsity)
    assert result.cache_copies == ()
    assert result.implementation == (implementation or "pallas_tpu")
    assert result.unaliased_output_bytes < 1 << 20
    assert set(result.collectives) == {"all-reduce"}
    layer = 2 * CAPACITY * (SMALL.num_kv_heads // 2) * SMALL.head_dim * 2  # bytes of K and V, of one chip
    assert result.temporary_bytes < layer


@tpu
def test_plain_xla_gathers_blocks_from_the_cache_in_place():
    """Slices by head made XLA relay the cache of narrow models with many layers: 2 copies of it here."""
    many = dataclasses.replace(MOE, num_layers=4, num_heads=32)
    result = compiled("xla", SPARSE, many, capacity=32768, cuts=Cuts(expert_shard="all"))
    assert result.cache_copies == ()


@tpu
def test_the_head_is_not_relaid():
    """Qwen's vocabulary is no whole number of tiles when it is cut in two."""
    qwen = dataclasses.replace(SMALL, vocab_size=151936)
    head = qwen.vocab_size // 2 * qwen.hidden_size * 2
    assert compiled("pallas_tpu", None, qwen).temporary_bytes < head // 2


@tpu
def test_sparse_temporaries():
    """Arrays: of the kernel no more than the scores of one query head beside dense ones, of plain XLA one
    layer's selected K and V too. Beside them a sparse step has more tuples, whose tables count as bytes."""
    heads = SMALL.num_kv_heads // 2
    scores = 2 * 4 * heads * MASS_ROWS * CAPACITY // KEYS_PER_MEAN  # float32, and their exponentials
    selected = 2 * 0.11 * CAPACITY * heads * SMALL.head_dim * 2
    for implementation, more in [("pallas_tpu", scores), ("xla", scores + selected)]:
        wide = {"num_speculative_tokens": 63, "arrays": True}
        dense, sparse = (compiled(implementation, s, **wide) for s in (None, SPARSE))
        assert 0 < dense.temporary_array_bytes < dense.temporary_bytes
        assert sparse.temporary_array_bytes <= dense.temporary_array_bytes + more


@tpu
@pytest.mark.parametrize("config", [SMALL, NARROW, MOE], ids=["128", "64, packed", "experts"])
def test_arguments_take_their_logical_bytes(config):
    """Two heads of 64 side by side leave no lane empty."""
    result = compiled("pallas_tpu", None, config)
    found = find_target("tpu:v5e", 8)
    target = Transformer(config, "bfloat16", shard_model(config, found.mesh((4, 2))))
    state = abstract_state(target, 4, CAPACITY, None)
    logical = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves((abstract_params(target), state))
    )
    assert result.argument_bytes <= 1.01 * logical
    assert result.cache_copies == ()


@tpu
def test_a_cache_that_is_cut_over_its_length():
    result = compiled("pallas_tpu", SPARSE, batch=1, cuts=Cuts(kv_shard="data"))
    assert result.cache_copies == ()
    assert result.implementation == "pallas_tpu"
    assert set(result.collectives) == {"all-gather", "all-reduce"}


@tpu
def test_what_does_not_fit_is_refused_by_the_compiler():
    big = program(mesh=(1, 2), batch=16, capacity=1 << 20, implementation="xla")
    with pytest.raises(RuntimeError, match=r"(?i)ran out of memory|hbm"):
        compile_slice(big)


@tpu
def test_shapes_that_the_kernel_does_not_take_are_refused_before():
    many = ModelConfig(**{**vars(SMALL), "num_heads": 64, "num_kv_heads": 2})
    with pytest.raises(NotImplementedError, match="rows"):
        compile_slice(program(many, num_speculative_tokens=63, implementation="pallas_tpu"))
    with pytest.raises(NotImplementedError, match="80 tokens in a step; allowed with pallas_tpu: up to 64"):
        compile_slice(program(num_speculative_tokens=79, implementation="pallas_tpu"))


def test_more_chips_than_there_are():
    with pytest.raises(UserError, match="larger than any tpu:v5e topology"):
        find_target("tpu:v5e", 1000)


@cuda
def test_a_slice_for_gpus():
    result = compiled("xla", SPARSE, platform="gpu:h200")
    assert result.implementation == "xla"
    assert set(result.collectives) <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    with pytest.raises(UserError, match="up to 8, one host"):
        find_target("gpu:h200", 16)
