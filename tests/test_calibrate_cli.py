"""`python -m sv_jax.calibrate` on a tiny model: the file that it writes, resuming, and bad input."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from sv_jax import calibrate
from sv_jax.calibrate_options import TOLERANCES, CalibrateOptions, parse_options
from sv_jax.config import UserError
from sv_jax.engine import language_model
from sv_jax.sparsity.config import AttentionSparsity, read_sparsity
from tests.checkpoints import tiny
from tests.engine import tiny_directory
from tests.fake_engine import python

LAYERS = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    """A model of three layers with a context of 512 tokens, its weights of a size that tells logits apart."""
    folder: Path = tmp_path_factory.mktemp("model") / "hf"
    tiny_directory.write(folder)  # the tokenizer
    config = tiny.config_dict("llama", num_hidden_layers=LAYERS, max_position_embeddings=512)
    weights = tiny.tensors(tiny.model_config(config))
    scaled = {k: v * v.shape[-1] ** -0.5 if v.ndim == 2 else 1 + 0.1 * v for k, v in weights.items()}
    tiny.save(folder, config, scaled)
    return str(folder)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("texts") / "own.jsonl"
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{i}" for i in rng.integers(1, 60, 300)) for _ in range(3)]
    path.write_text(
        "".join(json.dumps({"text": line, "name": f"t{i}"}) + "\n" for i, line in enumerate(lines))
    )
    return str(path)


@pytest.fixture
def command(directory, texts, tmp_path, monkeypatch, capsys):
    """Runs the program in this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(language_model, "enable_compilation_cache", lambda directory: None)

    def run(*arguments: str, output: str = "x.toml"):
        words = ["--model", directory, "--texts", texts, "--cache-dir", str(tmp_path / "cache")]
        words += ["--context=256", "--block-size=16", "--local-blocks=1", "--batch-size=2", "--reach=2"]
        code = calibrate.main([*words, "--output", str(tmp_path / output), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def stop_after(monkeypatch, questions: int) -> None:
    """Ctrl-C, as the program sees it, after so many times that it looked."""

    @contextlib.contextmanager
    def interrupts():
        left = iter(range(questions))
        yield lambda: next(left, None) is None

    monkeypatch.setattr(calibrate, "deferred_interrupts", interrupts)


def test_the_file_that_is_written(command, tmp_path, directory, texts):
    code, out, err = command("--max-anchors=2", "--tolerance=1e-9", "--max-dense-layers=0")
    assert code == 0
    config = read_sparsity(tmp_path / "x.toml")
    anchors = config.attention.anchors
    assert anchors is not None and anchors[0] == 0 and len(anchors) <= 2
    assert config.attention == AttentionSparsity(keep=0.25, block_size=16, local_blocks=1, anchors=anchors)
    provenance = dict(config.provenance)
    assert provenance["model"] == directory and "model_sha256" not in provenance
    assert provenance["texts"] == ["own/t0/256", "own/t1/256", "own/t2/256"]
    assert provenance["positions"] == 96 and provenance["method"] == "damage"
    assert provenance["every_layer_kl"] > 0 and 0 <= provenance["anchors_agreement"] <= 1
    assert len(provenance["texts_sha256"]) == 64
    text = (tmp_path / "x.toml").read_text()
    assert f"--verify sparse --sparsity {tmp_path / 'x.toml'}" in text
    assert text.count("its own") == len(anchors)
    assert f"anchors: {', '.join(map(str, anchors))} ({len(anchors)} of 3 layers)" in out
    assert "every layer selects" in out and "evenly spaced anchors were" in out
    assert out.endswith(f"written: {tmp_path / 'x.toml'}\n")
    assert "3 texts of 240 tokens, 96 positions compared" in err
    assert "measuring reuse (32 sparse steps)" in err and "measuring the chosen anchors" in err
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["x.toml"]


def test_a_layer_that_reads_everything(command, tmp_path):
    code, out, err = command("--max-dense-layers=1", "--dense-gain=0")
    attention = read_sparsity(tmp_path / "x.toml").attention
    assert code == 0 and len(attention.dense_layers) == 1 and attention.anchors
    (layer,) = attention.dense_layers
    assert f"layers that read everything: {layer} (1 of 3)" in out and f"but {layer}, dense" in out
    assert (tmp_path / "x.toml").read_text().count("everything\n") == 1
    assert "measuring dense layers, choice 1 (32 sparse steps)" in err
    provenance = dict(read_sparsity(tmp_path / "x.toml").provenance)
    assert provenance["with_dense_layers_kl"] <= provenance["every_layer_kl"]


def test_the_command_in_the_file_writes_the_same_file(command, tmp_path):
    assert command("--method=jaccard", "--seed=3", "--limit=2")[0] == 0
    text = (tmp_path / "x.toml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("# Written by: ")]
    words = shlex.split(line.removeprefix("# Written by: "))
    assert words[:3] == ["python", "-m", "sv_jax.calibrate"]
    assert calibrate.main([*words[3:], "--force"]) == 0
    assert (tmp_path / "x.toml").read_text() == text


@pytest.mark.parametrize("questions", [2, 12, 36, 50])
def test_an_interrupted_run_goes_on(questions, command, tmp_path, monkeypatch):
    assert command(output="whole.toml")[0] == 0
    with monkeypatch.context() as patch:
        stop_after(patch, questions)
        code, out, err = command()
    partial = tmp_path / "x.toml.partial.jsonl"
    steps = len(partial.read_text().splitlines()) if questions > 10 else 0
    assert (code, out) == (130, "") and not (tmp_path / "x.toml").exists()
    kept = f"measured steps: {steps}, in {partial}; the same command goes on from there\n"
    assert err.endswith(kept) if steps else not partial.exists()
    code, _, err = command()
    assert code == 0 and not partial.exists()
    assert (f"steps measured before: {steps}, in {partial}" in err) == (steps > 0)
    whole = (tmp_path / "whole.toml").read_text()
    assert (tmp_path / "x.toml").read_text() == whole.replace("whole.toml", "x.toml")


def test_a_file_that_appeared_meanwhile_is_kept(command, tmp_path, monkeypatch):
    def measured(*arguments, **options):
        (tmp_path / "x.toml").write_text("somebody else's")
        return original(*arguments, **options)

    from sv_jax.evaluation import calibration_run

    original = calibration_run.calibrate
    monkeypatch.setattr(calibration_run, "calibrate", measured)
    code, _, err = command("--method=jaccard")
    assert code == 2 and err.splitlines()[-1].startswith("error: --output")
    assert (tmp_path / "x.toml").read_text() == "somebody else's"
    assert (tmp_path / "x.toml.partial.jsonl").exists()
    assert command("--method=jaccard", "--force")[0] == 0


BAD_FOR_A_MODEL = [
    (["--context=600"], "--context 600 is not allowed; allowed for this model: up to 512"),
    (["--context=40"], "a context of 40 tokens is too short; allowed: at least 49"),
    (["--context=400"], "no text fills a context of 400 tokens; allowed: longer texts, or a smaller --c"),
    (["--context=128"], "79 tokens of context are 5 blocks, of which 2 are always read and 2 altogether"),
    (["--keep=1"], "207 tokens of context are 13 blocks, of which 2 are always read and 13 altogether"),
    (["--max-dense-layers=3"], "max-dense-layers 3; allowed for the 3 layers of this model: up to 2"),
    (["--max-anchors=1", "--reach=1"], "max-anchors 1 with reach 1; allowed for the 3 layers of this model"),
]


@pytest.mark.parametrize("arguments, message", BAD_FOR_A_MODEL)
def test_what_the_model_cannot_do_is_told_before_its_weights_are_read(arguments, message, command, tmp_path):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("error: ") and "loading" not in err
    assert not [p for p in tmp_path.iterdir() if p.is_file()]


BAD = [
    ([], "the following arguments are required: --output"),
    (["--output=missing/x.toml"], "--output 'missing/x.toml': 'missing' is no directory"),
    (
        ["--output=pyproject.toml"],
        "--output 'pyproject.toml' is there already; allowed: another name, or --force",
    ),
    (["--output=x", "--keep=0"], "--keep 0.0 is not allowed; allowed: a number above 0, up to 1"),
    (["--output=x", "--block-size=5"], "--block-size 5 is not allowed; allowed: 16, 32, 64, 128"),
    (["--output=x", "--score=best"], "--score 'best' is not allowed; allowed: mean, bound"),
    (["--output=x", "--method=guess"], "--method 'guess' is not allowed; allowed: damage, jaccard"),
    (["--output=x", "--tolerance=-1"], "--tolerance -1.0 is not allowed; allowed: a number of at least 0"),
    (["--output=x", "--method=jaccard", "--tolerance=2"], "--tolerance 2 is not allowed; allowed: up to 1"),
    (
        ["--output=x", "--max-anchors=0"],
        "--max-anchors 0 is not allowed; allowed: a whole number of at least 1",
    ),
    (
        ["--output=x", "--max-dense-layers=-1"],
        "--max-dense-layers -1 is not allowed; allowed: a whole number",
    ),
    (["--output=x", "--dense-gain=1.5"], "--dense-gain 1.5 is not allowed; allowed: a number from 0 to 1"),
    (["--output=x", "--texts=missing.jsonl"], "--texts 'missing.jsonl': No such file"),
    (["--output=x", "--anchors=0"], "unrecognized arguments: --anchors=0; --help lists what is allowed"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert calibrate.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: {message}")


def test_mistakes_and_help_do_not_wait_for_jax():
    code = f"""if True:
        import sys
        from sv_jax import calibrate
        for arguments, _ in {BAD!r}:
            assert calibrate.main(arguments) == 2, arguments
        try:
            calibrate.main(["--help"])
        except SystemExit:
            assert "jax" not in sys.modules
    """
    done = python(code)
    assert done.returncode == 0, done.stderr.decode()
    assert b"--max-anchors" in done.stdout


def test_options():
    options = parse_options(["--output", "a b.toml"])
    assert options == CalibrateOptions(output="a b.toml", tolerance=TOLERANCES["damage"], max_dense_layers=2)
    assert options.attention == AttentionSparsity(keep=0.25)
    assert parse_options(["--output=x", "--method=jaccard"]).tolerance == TOLERANCES["jaccard"]
    assert parse_options(["--output=x", "--method=jaccard"]).max_dense_layers == 0
    given = parse_options(["--output=a b", "--keep=.5", "--score=bound", "--force", "--tolerance=0.5"])
    assert given.command() == (
        "python -m sv_jax.calibrate --output 'a b' --keep 0.5 --score bound --tolerance 0.5"
    )
    with pytest.raises(UserError, match="--seed -1 is not allowed"):
        parse_options(["--output=x", "--seed=-1"])


def test_thresholds_beside_what_a_file_has(command, tmp_path, texts):
    """The file's attention stays; what is written is read back, and names its command."""
    path = tmp_path / "attention.toml"
    path.write_text("[attention]\nkeep = 0.5\n[provenance]\nmodel = 'm'\n")
    code, out, err = command("--part=ffn", "--density=.25", "--ffn-rule=product", "--sparsity", str(path))
    config = read_sparsity(tmp_path / "x.toml")
    assert code == 0 and config.attention == AttentionSparsity(keep=0.5) and config.experts is None
    assert config.ffn.rule == "product" and len(config.ffn.thresholds) == LAYERS
    assert len(set(config.ffn.thresholds)) == LAYERS and min(config.ffn.thresholds) > 0
    provenance = dict(config.provenance)
    assert provenance["density"] == 0.25 and provenance["tokens"] == 720
    assert provenance["documents"] == ["t0", "t1", "t2"] and "density: 0.25" in out and "watching" in err
    assert (
        "--part ffn" in (tmp_path / "x.toml").read_text()
        and "--ffn-rule product" in (tmp_path / "x.toml").read_text()
    )

    code, _, _ = command("--part=ffn", "--one-threshold", output="one.toml")
    thresholds = read_sparsity(tmp_path / "one.toml").ffn.thresholds
    assert code == 0 and len(thresholds) == 1


def test_a_model_without_experts(command, tmp_path):
    code, _, err = command("--part=experts")
    assert code == 2 and "has no experts; allowed: attention, ffn" in err
    assert not (tmp_path / "x.toml").exists()


def test_betas(command, tmp_path, tmp_path_factory):
    """Of a model with experts: medians, or what skips a wanted share."""
    folder = tmp_path_factory.mktemp("moe") / "hf"
    tiny_directory.write(folder)
    config = tiny.config_dict(
        "olmoe", num_hidden_layers=2, max_position_embeddings=512, num_experts=4, num_experts_per_tok=2
    )
    tiny.save(folder, config, tiny.tensors(tiny.model_config(config)))
    k = tiny.model_config(config).moe.num_experts_per_tok
    code, out, _ = command("--part=experts", "--max-skipped=1", "--model", str(folder))
    experts = read_sparsity(tmp_path / "x.toml").experts
    assert code == 0 and len(experts.betas) == 2 and {len(row) for row in experts.betas} == {k - 1}
    assert "beta_quantile: 0.5" in out
    code, _, err = command("--part=experts", f"--max-skipped={k}", "--model", str(folder), output="more.toml")
    assert code == 2 and f"max-skipped {k}; allowed for this model: up to {k - 1}" in err
