"""Meshes: the same tokens on each, and what cannot be cut is refused with the numbers."""

import dataclasses
import re
import subprocess
import sys

import jax
import pytest

from sv_jax.config import UserError
from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.model.transformer import abstract_params
from sv_jax.sharding import LOGICAL_AXES, make_sharding, parse_mesh
from tests.tiny import TINY, decode, make_model, make_target, random_prompts, replace, row_counts

NEW = 16
PROMPTS = random_prompts((5, 20, 13, 1))
# Like SmolLM2's 9 and 3 heads: neither divides by 2. Nor does the vocabulary.
ODD = replace(TINY, hidden_size=36, num_heads=9, num_kv_heads=3, head_dim=4, vocab_size=61)


@pytest.mark.parametrize(
    ("mesh", "config"),
    [
        pytest.param((2, 1), TINY, id="2x1"),
        pytest.param((1, 2), TINY, id="1x2"),
        pytest.param((4, 2), TINY, id="4x2"),
        pytest.param((1, 2), ODD, id="1x2, odd heads and vocabulary"),
        pytest.param((4, 2), ODD, id="4x2, odd heads and vocabulary"),
    ],
)
def test_same_tokens_on_every_mesh(mesh, config):
    prompts = [[token % config.vocab_size for token in prompt] for prompt in PROMPTS]
    expected, alone = decode(*make_model(config), NoDraft(), prompts, new_tokens=NEW)
    got, state = decode(*make_model(config, mesh), PromptLookup(4), prompts, new_tokens=NEW)
    assert got == expected
    assert sum(row.accepted for row in row_counts(state, 5)) > 0
    assert len(state.cache.keys[0].sharding.device_set) == mesh[0] * mesh[1]
    shard = state.cache.keys[0].addressable_shards[0].data
    assert shard.shape[0] == len(prompts) // mesh[0]
    if config is TINY:  # heads are cut as well
        assert shard.shape[1] == TINY.num_kv_heads // mesh[1]
    assert alone.cache.keys[0].sharding.is_fully_replicated


def test_a_batch_smaller_than_the_data_axis_is_padded_with_rows_that_do_nothing():
    prompts = [PROMPTS[1], [], PROMPTS[3], []]
    expected, _ = decode(*make_model(), NoDraft(), PROMPTS, new_tokens=NEW)
    got, state = decode(*make_model(TINY, (4, 2)), PromptLookup(4), prompts, new_tokens=NEW)
    assert got == [expected[1], [], expected[3], []]
    assert state.lengths.tolist() == [20 + NEW - 1, 0, 1 + NEW - 1, 0]
    padding = row_counts(state, 5)[1]
    assert (padding.histogram == 0).all() and padding.drafted == 0


def test_weights_are_cut_as_the_table_says():
    params = abstract_params(make_target(TINY, (4, 2)))
    layer = params["layers_0"]
    cut = {
        "query": (layer["attention"]["query"]["kernel"], 1),
        "key": (layer["attention"]["key"]["kernel"], 1),
        "output": (layer["attention"]["output"]["kernel"], 0),
        "up": (layer["ffn"]["up"]["kernel"], 1),
        "down": (layer["ffn"]["down"]["kernel"], 0),
        "embedding": (params["embedding"]["embedding"], 0),
    }
    for name, (leaf, axis) in cut.items():
        shard = leaf.sharding.shard_shape(leaf.shape)
        expected = tuple(n // 2 if i == axis else n for i, n in enumerate(leaf.shape))
        assert shard == expected, name


def test_what_does_not_divide_stays_whole_and_is_told():
    sharding = make_sharding(ODD, (2, 2))
    assert sharding.replicated == {"heads", "kv_heads", "vocab"}
    assert sharding.spec("batch", "heads") == jax.sharding.PartitionSpec("data", None)
    assert sharding.spec("ffn", "embed") == jax.sharding.PartitionSpec("model", None)
    expected = "2x2 (data x model) of cpu devices; attention and vocabulary replicated over model"
    assert expected in sharding.describe()
    heads_only = make_sharding(replace(ODD, vocab_size=62), (1, 2)).describe()
    assert "attention replicated" in heads_only and "vocabulary" not in heads_only
    vocabulary_only = make_sharding(replace(TINY, vocab_size=61), (1, 2)).describe()
    assert "; vocabulary replicated" in vocabulary_only
    assert "replicated" not in make_sharding(TINY, (4, 2)).describe()


def test_logical_axes_name_mesh_axes():
    assert set(LOGICAL_AXES.values()) == {"data", "model", None}


def test_an_ffn_that_does_not_divide_is_refused():
    message = r"a model axis of 3 does not divide intermediate_size=64; allowed: 1, 2, 4, 8, 16, 32, 64"
    with pytest.raises(UserError, match=message):
        make_sharding(TINY, (1, 3))


@pytest.mark.parametrize(("text", "expected"), [("1x1", (1, 1)), ("4x2", (4, 2)), ("16X3", (16, 3))])
def test_parse_mesh(text, expected):
    assert parse_mesh(text) == expected


@pytest.mark.parametrize("text", ["", "4", "x", "4x", "4x2x1", "0x2", "2x-1", "axb", "4 by 2", "1.5x2"])
def test_parse_mesh_refuses(text):
    with pytest.raises(UserError, match=re.escape(f"--mesh {text!r} is not DATAxMODEL")):
        parse_mesh(text)


def test_too_few_devices():
    with pytest.raises(UserError, match=r"a mesh of 16 devices needs .* already running with 8"):
        make_sharding(TINY, (8, 2))


def test_too_few_accelerators(monkeypatch):
    @dataclasses.dataclass
    class Fake:
        platform: str = "tpu"

    monkeypatch.setattr(jax, "devices", lambda: [Fake()] * 4)
    message = r"a mesh of 8 devices is larger than the 4 tpu devices here; .*JAX_PLATFORMS=cpu to emulate 8"
    with pytest.raises(UserError, match=message):
        make_sharding(TINY, (4, 2))


def test_devices_are_emulated_on_first_use():
    """In a fresh process nothing has set the number of CPU devices; a small mesh leaves others unused."""
    program = (
        "from sv_jax.sharding import make_sharding; from tests.tiny import TINY; import jax\n"
        "assert make_sharding(TINY, (3, 2)).mesh.size == 6 and len(jax.devices()) == 6\n"
        "assert make_sharding(TINY, (1, 2)).mesh.size == 2"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
