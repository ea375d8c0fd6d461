"""Directories that transformers itself writes: loaded into our trees, tokenized to the same ids."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from sv_jax.checkpoints import load_params, resolve
from sv_jax.checkpoints.tokenizer import Tokenizer
from tests.checkpoints import tiny, tiny_gguf

pytestmark = pytest.mark.parity

VARIANTS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(params=VARIANTS)
def model(request):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, changes = VARIANTS[request.param]
    changes = {"head_dim": tiny.HD, "eos_token_id": [3, 4]} | changes
    sizes = {key: value for key, value in tiny.BASE.items() if key not in changes}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **sizes, **changes)
    )


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_saved_models_load_exactly(model, tmp_path, shard_size):
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    checkpoint = resolve(str(tmp_path), progress=False)
    assert checkpoint.eos_token_ids == (3, 4)
    contents = {name: value.detach().float().numpy() for name, value in model.state_dict().items()}
    loaded = load_params(checkpoint, tiny.tree(checkpoint.config), progress=False)
    tiny.assert_same(loaded, tiny.expected(contents, checkpoint.config))


def test_the_transformer_asks_for_what_the_tables_know(model, tmp_path):
    """The model's own abstract tree, not the tests': a renamed parameter would be found here."""
    transformer = pytest.importorskip("sv_jax.model.transformer")
    sharding = pytest.importorskip("sv_jax.sharding")
    model.save_pretrained(tmp_path)
    checkpoint = resolve(str(tmp_path), progress=False)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    target = transformer.Transformer(checkpoint.config, "float32", sharding.Sharding(mesh))
    abstract = transformer.abstract_params(target)
    loaded = load_params(checkpoint, abstract, progress=False)
    contents = {name: value.detach().float().numpy() for name, value in model.state_dict().items()}
    tiny.assert_same(loaded, tiny.expected(contents, checkpoint.config))


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}]
)
def test_bos_and_eos_like_transformers(tmp_path, flags):
    transformers = pytest.importorskip("transformers")
    config = tiny.model_config(tiny.config_dict("llama", vocab_size=len(tiny_gguf.vocabulary())))
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config))
    directory = resolve(str(path), cache_directory=tmp_path, progress=False).directory
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | flags))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
    for text in ("hello w", "", "<|im_start|>hello"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
