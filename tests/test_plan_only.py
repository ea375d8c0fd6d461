"""`generate --plan-only`: what it prints, what it refuses, and that a config is all it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from sv_jax import generate, plan_only
from sv_jax.checkpoints.config_alone import find_config
from sv_jax.checkpoints.registry import CONFIGS, DERIVED, NAMES, REGISTRY
from sv_jax.checkpoints.resolve import (
    PROVENANCE_NAME,
    _derived_directory,
    _registry_directory,
    find_fetched,
    resolve,
)
from sv_jax.checkpoints.wheels import file_sha256
from sv_jax.command import USER_ERROR
from sv_jax.config import UserError
from sv_jax.options import OPTIONS, parse_options
from sv_jax.planning.report import LABEL

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
MOE = TINY | {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
V5E = ("--platform", "tpu:v5e")


@pytest.fixture
def tiny(tmp_path):
    """A directory that has a config.json, and weights that cannot be read."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    return tmp_path


def run(capsys, *arguments):
    check = [] if "--compile-check" in arguments else ["--no-compile-check"]  # a minute where it can be done
    code = generate.main(["--plan-only", *check, *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def ask(capsys, *arguments):
    code, out, err = run(capsys, *arguments, "--json")
    assert err == "" or code == USER_ERROR
    assert len(out.splitlines()) == 1, "one line of JSON and nothing else"
    return code, json.loads(out)


def test_a_directory_is_asked_for_its_config_alone(tiny, capsys):
    code, out, err = run(capsys, "--model", tiny, *V5E, "--batch-size", 2)
    assert (code, err) == (0, "")
    assert "fits: " in out and "15.75 GiB" in out and "K/V cache" in out
    assert LABEL in out and "floor, ms" in out and "no collectives" in out
    assert out.endswith("compile check: not run, as --no-compile-check says\n")
    assert out.count("dense, ") == out.count("sparse, ") == 2, "verify steps and plain ones"
    by_file = run(capsys, "--model", tiny / "config.json", *V5E, "--batch-size", 2)[1]
    assert by_file.replace("/config.json", "").replace("local file", "local directory") == out


def test_nothing_else_runs(tiny, capsys, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("a plan needs no prompts, no weights and no devices")

    for name in ("read_prompts", "load_model", "request_settings"):
        monkeypatch.setattr(generate, name, never)
    monkeypatch.setattr("sv_jax.sharding.ensure_devices", never)
    monkeypatch.setattr("sv_jax.checkpoints.wheels.fetch", never)
    assert run(capsys, "--model", tiny, *V5E, "--mesh", "8x2")[0] == 0


def test_in_a_process_of_its_own(tiny):
    """JAX_PLATFORMS asks for an accelerator, which is not there; a plan takes nobody's, and needs none."""
    command = [sys.executable, "-m", "sv_jax.generate", "--plan-only", "--model", str(tiny), *V5E]
    command.append("--no-compile-check")
    environment = os.environ | {"JAX_PLATFORMS": "tpu"}
    got = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    # A compiler that is installed may log that there is no driver: that is no error, and not ours.
    assert got.returncode == 0 and "fits: " in got.stdout, got.stderr
    assert "Traceback" not in got.stderr and "error:" not in got.stderr


def test_what_the_compiler_says(tiny, capsys):
    """Where it is installed; else what to install. Heads fill whole lanes: narrow ones that cannot be packed
    are relaid at entry and exit of a slice."""
    (tiny / "config.json").write_text(json.dumps(TINY | {"head_dim": 128}))
    code, out, err = run(capsys, "--model", tiny, *V5E, "--mesh", "2x2", "--batch-size", 2, "--compile-check")
    assert (code, err) == (0, "")
    last = out.splitlines()[-1]
    if importlib.util.find_spec("libtpu") is None:
        assert (
            last
            == "compile check: not run: libtpu is not installed; it comes with: pip install 'sv_jax[aot]'"
        )
        return
    assert re.match(
        r"compile check: v5e:2x2, attention (xla|pallas_tpu), in \d+ s: .* GiB of arguments", last
    )
    assert "copies of a cache" not in last
    code, got = ask(capsys, "--model", tiny, *V5E, "--compile-check", "--implementation", "xla")
    assert code == 0 and got["compile_check"]["implementation"] == "xla"
    code, _, err = run(
        capsys, "--model", tiny, *V5E, "--compile-check", "--implementation", "pallas_tpu",
        "--num-speculative-tokens", 80,
    )  # fmt: skip
    assert code == USER_ERROR and "81 tokens in a step" in err


PART = {"bytes", "flops", "floor_ms", "bound"}


def test_json(tiny, capsys):
    arguments = ("--model", tiny, *V5E, "--mesh", "2x2", "--batch-size", 3, "--max-model-len", 512)
    code, got = ask(capsys, *arguments, "--num-speculative-tokens", 3)
    assert code == 0
    assert set(got) == {
        "model", "hardware", "mesh", "max_model_len", "batch_size", "num_speculative_tokens", "memory",
        "sparsity", "steps", "steps_are", "notes", "compile_check",
    }  # fmt: skip
    assert got["model"]["parameters"] == 2 * 64 * 32 + 2 * (3 * 32 * 64 + 2 * 32 * 32 + 2 * 32 * 16 + 64) + 32
    assert got["model"]["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2 and got["model"]["dtype"] == "bfloat16"
    assert got["hardware"]["topology"] == "v5e:2x2" and got["hardware"]["bandwidth_bytes_per_second"] == 819e9
    assert got["mesh"] == {"data": 2, "model": 2, "whole_on_each_chip": []}
    memory = got["memory"]
    assert memory["fits"] is True and memory["available_bytes"] == int(15.75 * 2**30)
    assert memory["in_a_step_bytes"] == sum(memory["resident"].values()) + sum(memory["step"].values())
    assert memory["needed_bytes"] >= memory["in_a_step_bytes"] and memory["meshes_that_fit"] == []
    kinds = [(step["verification"], step["tokens_per_row"]) for step in got["steps"]]
    assert kinds == [("dense", 4), ("dense", 1), ("sparse", 4), ("sparse", 1)]
    for step in got["steps"]:
        assert all(set(part) == PART for part in [*step["parts"].values(), step["total"]])
        assert step["total"]["bytes"] == sum(part["bytes"] for part in step["parts"].values())
        assert {part["bound"] for part in step["parts"].values()} <= {"bytes", "FLOPs"}
        assert step["experts_per_layer"] is None
    assert got["steps_are"] == LABEL and got["compile_check"] is None
    assert got["sparsity"]["asked_for"] is False
    assert "the batch is padded to 4 rows" in got["notes"]


def test_sparsity_is_that_of_generate(tiny, capsys, tmp_path):
    (tmp_path / "s.toml").write_text("[attention]\nkeep = 0.5\nblock-size = 16\n")
    base = ("--model", tiny, *V5E, "--verify", "sparse")
    half = ask(capsys, *base, "--sparsity", tmp_path / "s.toml")[1]
    tenth = ask(capsys, *base, "--sparsity", tmp_path / "s.toml", "--keep", "0.125")[1]
    dense, sparse = (step["parts"]["K/V cache"]["bytes"] for step in half["steps"][::2])
    assert (dense, sparse) == (16 * 1024 * 2 * 2 * 2 * 2 * 16 * 8, dense / 2), "heads of 8 take 128 lanes"
    assert tenth["steps"][2]["parts"]["K/V cache"]["bytes"] == dense / 8
    assert "block summaries" in half["memory"]["resident"] and half["sparsity"]["asked_for"]
    paper = ask(capsys, "--model", tiny, *V5E)[1]
    assert "block summaries" not in paper["memory"]["resident"]
    assert paper["steps"][0]["parts"] == paper["steps"][2]["parts"], "a context within the paper's 4096"


def test_without_drafts_there_are_plain_steps(tiny, capsys):
    base = ("--model", tiny, *V5E)
    for arguments in (("--draft-method", "none"), ("--num-speculative-tokens", 0)):
        assert [step["tokens_per_row"] for step in ask(capsys, *base, *arguments)[1]["steps"]] == [1, 1]
    auto = ask(capsys, *base, "--num-speculative-tokens", "auto")[1]
    assert [step["tokens_per_row"] for step in auto["steps"]] == [16, 1, 16, 1]


def test_defaults(tiny, capsys):
    got = ask(capsys, "--model", tiny, *V5E)[1]
    assert (got["max_model_len"], got["batch_size"], got["num_speculative_tokens"]) == (1024, 16, 7)
    assert ask(capsys, "--model", tiny, *V5E, "--max-batch-size", 5)[1]["batch_size"] == 5
    wide = ask(capsys, "--model", tiny, *V5E, "--dtype", "float32")[1]
    assert wide["memory"]["resident"]["weights: head"] == 2 * got["memory"]["resident"]["weights: head"]
    assert any("float32" in note for note in wide["notes"])


def test_notes(tiny, capsys):
    (tiny / "config.json").write_text(json.dumps(MOE))
    gpu = ask(capsys, "--model", tiny, "--platform", "gpu:h100")[1]["notes"]
    assert any("even router" in note for note in gpu) and any("MEM_FRACTION" in note for note in gpu)
    assert not any("lanes" in note for note in gpu)
    tpu = ask(capsys, "--model", tiny, *V5E, "--mesh", "3x1", "--verify", "sparse", "--ffn-rule", "gate",
              "--ffn-threshold", "0.1")[1]["notes"]  # fmt: skip
    assert any("v5e:2x2 has 4 chips, of which the mesh uses 3" in note for note in tpu)
    assert any("tiles of 128 lanes" in note and "16 times" in note for note in tpu)
    assert any("'gate' leaves out arithmetic" in note for note in tpu)


# Refusals.


def test_what_does_not_fit_is_refused_with_both_numbers(capsys):
    base = ("--model", "qwen3-30b-a3b", *V5E, "--max-model-len", 32768, "--batch-size", 1)
    code, out, err = run(capsys, *base, "--mesh", "4x2")
    assert code == USER_ERROR and len(err.splitlines()) == 1
    assert err.startswith(
        "error: qwen3-30b-a3b on 4x2 of tpu:v5e needs 31.48 GiB a chip, which has 15.75 GiB"
    )
    assert "allowed: --mesh 1x8, on which it fits" in err
    assert "needs 31.48 GiB a chip, which has 15.75 GiB" in out and "floor, ms" in out
    code, got = ask(capsys, *base, "--mesh", "4x2")
    assert code == USER_ERROR and got["memory"]["fits"] is False
    assert got["memory"]["meshes_that_fit"] == ["1x8"]
    assert ask(capsys, *base, "--mesh", "1x8")[0] == 0, "as it said"


def test_where_no_mesh_of_as_many_chips_fits(capsys):
    code, _, err = run(capsys, "--model", "llama-3.1-8b", *V5E, "--batch-size", 1)
    assert code == USER_ERROR and "needs 46.98 GiB a chip, which has 15.75 GiB" in err
    assert "--max-model-len (131072)" in err and "no other mesh" not in err
    code, _, err = run(capsys, "--model", "qwen3-30b-a3b", *V5E, "--batch-size", 1, "--mesh", "2x2")
    assert code == USER_ERROR and err.endswith("or more chips; no other mesh of 4 chips fits\n")


def test_what_only_growing_does_not_fit_is_told(capsys):
    arguments = ("--model", "llama-3.1-8b", *V5E, "--mesh", "4x2", "--max-model-len", 32768)
    code, _, err = run(capsys, *arguments, "--batch-size", 12)
    assert code == USER_ERROR and "a chip while its cache grows, which has 15.75 GiB" in err


BAD = [
    ([], "--plan-only needs --platform; allowed: tpu:v5e, tpu:v6e, tpu:v5p, gpu:h100, gpu:h200"),
    (["--platform", "tpu:v4"], "--platform 'tpu:v4' is not allowed; allowed: tpu:v5e, tpu:v6e, tpu:v5p, gpu"),
    ([*V5E, "--mesh", "8"], "--mesh '8' is not DATAxMODEL"),
    ([*V5E, "--mesh", "1x3"], "a model axis of 3 does not divide intermediate_size=64; allowed: 1, 2, 4"),
    ([*V5E, "--mesh", "32x16"], "a mesh of 512 chips is larger than any tpu:v5e topology; allowed: up to"),
    ([*V5E, "--max-model-len", "1025"], "max_model_len=1025; allowed for"),
    ([*V5E, "--keep", "0.5"], "--keep says how to verify sparsely; allowed: only with --verify sparse"),
    ([*V5E, "--verify", "sparse", "--anchors", "7"], "anchors has layer 7; allowed for this model: 0 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) or "nothing" for a, _ in BAD])
def test_refusals(arguments, message, tiny, capsys):
    code, out, err = run(capsys, "--model", tiny, *arguments)
    assert (code, out) == (USER_ERROR, "")
    assert err.startswith(f"error: {message}") and len(err.splitlines()) == 1


@pytest.mark.parametrize("option", [("--platform", "tpu:v5e"), ("--batch-size", "4")])
def test_options_of_a_plan_need_one(option, fake, capsys):
    assert generate.main([*option, "--prompt", "a"]) == USER_ERROR
    assert f"{option[0]} says what to plan for; allowed: only with --plan-only" in capsys.readouterr().err


# Where configs come from.


@pytest.mark.parametrize("name", CONFIGS)
def test_packaged_configs_have_no_weights(name, tmp_path):
    config, origin = find_config(name)
    assert origin == "packaged config" and config.num_layers in (32, 48)
    assert name in OPTIONS["plan_only"].help
    with pytest.raises(
        UserError, match=f"^model '{name}' is a config for --plan-only, without weights; allow"
    ):
        resolve(name, cache_directory=tmp_path)


def test_packaged_configs_are_those_of_the_cards():
    llama, qwen = (find_config(name)[0] for name in CONFIGS)
    assert llama.rope_scaling is not None and llama.rope_scaling.kind == "llama3"
    assert (llama.rope_theta, llama.rope_scaling.factor, llama.max_position_embeddings) == (5e5, 8, 131072)
    assert (llama.rms_norm_eps, llama.tie_word_embeddings, llama.moe) == (1e-5, False, None)
    assert qwen.moe is not None and qwen.moe.norm_topk_prob and qwen.qk_norm == "head"
    assert (qwen.rope_theta, qwen.max_position_embeddings, qwen.head_dim) == (1e6, 40960, 128)
    assert qwen.dense_ffn_layers == () and qwen.sliding_windows == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_not_fetched_is_said_to_be(name, tmp_path, capsys):
    code, _, err = run(capsys, "--model", name, *V5E, "--cache-dir", tmp_path)
    assert code == USER_ERROR and "has its config inside of its weights, which are not fetched yet" in err
    assert "a config.json, llama-3.1-8b, qwen3-30b-a3b" in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_fetched(name, tmp_path, capsys):
    if name in REGISTRY:
        relative = _registry_directory(name, "bfloat16")
    else:
        relative = _derived_directory(name, "bfloat16", file_sha256(DERIVED[name].cut))
    directory = tmp_path / relative
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(TINY))
    (directory / PROVENANCE_NAME).write_text(json.dumps({"provenance": "made here"}))
    assert find_fetched(name, tmp_path) is not None
    code, out, _ = run(capsys, "--model", name, *V5E, "--cache-dir", tmp_path)
    assert code == 0 and out.startswith(f"{name} (llama; made here)")


@pytest.mark.parametrize("model", ["org/name", "nowhere", "x.gguf"])
def test_no_config(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        UserError, match=rf"^model '{model}' is no config that is here; allowed: a Hugging Face"
    ):
        find_config(model)


def test_a_plan_needs_no_running_jax_platform(tiny, monkeypatch):
    """The CPU is asked for before anything else of JAX is."""
    asked = []
    monkeypatch.setattr(jax.config, "update", lambda *change: asked.append(change))
    plan_only.run_plan(parse_options(["--plan-only", "--model", str(tiny), *V5E, "--json"]))
    assert asked == [("jax_platforms", "cpu")]
