"""load_model: what it refuses, when it reads, and the compilation cache it switches on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from sv_jax.config import UserError
from sv_jax.engine import load_model
from sv_jax.engine.settings import Settings
from tests.engine import tiny_directory
from tests.engine.tiny_directory import CONTEXT

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "float16"}, r"dtype 'float16'; allowed: float32, bfloat16"),
        ({"max_model_len": CONTEXT + 1}, rf"max_model_len={CONTEXT + 1}; allowed for .*: 2 to {CONTEXT}"),
        ({"max_model_len": 1}, rf"max_model_len=1; allowed for .*: 2 to {CONTEXT}"),
        ({"max_model_len": 0}, rf"max_model_len=0; allowed for .*: 2 to {CONTEXT}"),
        (
            {"implementation": "pallas_tpu"},
            "implementation 'pallas_tpu'; allowed on cpu: xla, pallas_tpu_interpret",
        ),
        ({"implementation": "fast"}, "implementation 'fast'; allowed on cpu: xla, pallas_tpu_interpret"),
        ({"mesh": (0, 1)}, "mesh 0x1; allowed: 1 or more shards on each axis"),
        ({"mesh": (2, -1)}, "mesh 2x-1; allowed: 1 or more shards on each axis"),
        ({"mesh": (1, 5)}, "a model axis of 5 does not divide intermediate_size=48; allowed: 1, 2, 3, 4"),
        ({"mesh": (64, 1)}, "a mesh of 64 devices"),
    ],
)
def test_refused_without_reading_weights(load, tmp_path, options, message):
    directory = tiny_directory.write(tmp_path / "hf")
    (directory / "model.safetensors").write_bytes(b"reading this would raise another error")
    with pytest.raises(UserError, match=message):
        load_model(str(directory), cache_directory=tmp_path, progress=False, **options)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(UserError, match="unknown model 'gpt5': known names are smollm2-135m"):
        load_model("gpt5", cache_directory=tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_have_the_dtype_and_lie_on_the_mesh(load, dtype):
    model = load(dtype=dtype, mesh=(2, 2))
    leaves = jax.tree.leaves(model.params)
    assert {str(leaf.dtype) for leaf in leaves} == {dtype}
    assert {len(leaf.sharding.device_set) for leaf in leaves} == {4}
    assert model.load_seconds > 0


def test_defaults(load):
    model = load()
    assert (model.dtype, model.max_model_len) == ("float32", CONTEXT)
    assert load(max_model_len=2).max_model_len == 2
    assert "local directory" in model.provenance


def test_what_attends_to_the_cache(load):
    """A named kernel is asked before anything runs whether it takes the shapes of steps."""
    model = load(implementation="pallas_tpu_interpret")
    assert model.step_implementations(Settings(), 1, None) == ("pallas_tpu_interpret",)
    assert load().step_implementations(Settings(), 1, None) == ("xla",)
    with pytest.raises(UserError, match="a step of 65 tokens; allowed with pallas_tpu_interpret: up to 64"):
        model.check_request([[1, 2]], num_speculative_tokens=64)
    load().check_request([[1, 2]], num_speculative_tokens=64)


def test_lazy_weights_are_read_once(load):
    model = load(lazy=True)
    assert model.load_seconds == 0
    params = model.params
    seconds = model.load_seconds
    assert seconds > 0
    model.load_weights()
    assert model.params is params and model.load_seconds == seconds


FAST = "--xla_backend_optimization_level=0"
CHILD = """
import json, sys
import jax, jax.numpy as jnp
jax.jit(lambda x: x + 1)(jnp.zeros(3))  # in a notebook JAX has long been in use
import sv_jax
model = sv_jax.load_model(sys.argv[1], cache_directory=sys.argv[2], progress=False)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
ids = model.generate([[1, 2, 3]], max_new_tokens=1).outputs[0].token_ids
print(json.dumps([jax.config.jax_compilation_cache_dir, ids]))
"""


def run_child(tmp_path, **environment):
    directory = tiny_directory.write(tmp_path / "hf")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("JAX_") or k == "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(directory), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**clean, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST, **environment},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])[0]


def test_programs_are_kept_beside_the_weights(tmp_path):
    assert run_child(tmp_path) == str(tmp_path / "cache" / "xla")
    assert list((tmp_path / "cache" / "xla").iterdir())


def test_a_cache_that_the_user_chose_is_used(tmp_path):
    own = tmp_path / "own"
    assert run_child(tmp_path, JAX_COMPILATION_CACHE_DIR=str(own)) == str(own)
    assert list(own.iterdir()) and not (tmp_path / "cache" / "xla").exists()


def test_a_cache_that_the_user_switched_off_stays_off(tmp_path):
    assert run_child(tmp_path, JAX_ENABLE_COMPILATION_CACHE="0") is None
    assert not (tmp_path / "cache" / "xla").exists()
