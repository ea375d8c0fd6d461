"""The command line with --verify sparse: what it asks for, says and refuses. With a fake engine."""

from __future__ import annotations

import json

import pytest

from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig
from sv_jax.summary import provenance_lines
from tests.fake_engine import SPARSE, python, run

SHA = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
KEEP = ["--prompt", "one", "--verify=sparse", "--keep=0.25"]


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "sparsity.toml"
        path.write_text(text)
        return str(path)

    return write


def test_options_reach_the_engine(fake, capsys, file):
    path = file("[attention]\nkeep = 0.5\nblock-size = 16\n[provenance]\nmodel = 'm'")
    arguments = ["--sparsity", path, "--keep=0.25", "--score=bound", "--anchors=0,2", "--dense-layers=5"]
    code, _, _ = run(capsys, "--prompt", "one", "--verify=sparse", *arguments)
    model = fake.loaded[0]
    attention = AttentionSparsity(keep=0.25, block_size=16, score="bound", anchors=(0, 2), dense_layers=(5,))
    assert code == 0
    assert model.checked == model.arguments
    assert model.arguments["sparsity"] == SparsityConfig(attention, provenance=(("model", "m"),))


def test_the_plan_is_told_before_the_weights(fake, capsys):
    code, _, err = run(capsys, *KEEP)
    assert code == 0 and fake.loaded[0].calls[1:4] == ["check", "describe", "weights"]
    assert "reads (0, 0.25)\n  of a fake\n" in err and "sparsity file" not in err


def test_a_dense_run_says_nothing_of_it(fake, capsys):
    _, out, err = run(capsys, "--prompt", "one", "--json")
    assert "sparse" not in err and "cache reads" not in err and "describe" not in fake.loaded[0].calls
    assert json.loads(out)["stats"]["sparse_attention"] is None


@pytest.mark.parametrize("sampling", [[], ["--temperature=1"]])
def test_a_lossy_run_says_so(sampling, fake, capsys):
    code, out, err = run(capsys, *KEEP, "--json", *sampling)
    lines = err.splitlines()
    assert code == 0 and lines[-1] == (
        "verification was sparse, which is lossy: 30 of 40 row-steps (75 %) left a part of the cache out; "
        "the output may differ from plain decoding"
    )
    assert "cache reads 12.2 KV blocks (3.5 MB) per token; dense: 50.0 (12.8 MB)" in lines
    assert "was dense" not in err
    assert json.loads(out)["stats"]["sparse_attention"] == SPARSE


LAWS = {"greedy": ([], "equals plain greedy decoding up to near-ties")}
LAWS["sampled"] = (["--temperature=1"], "follows the law of plain sampling")


@pytest.mark.parametrize("how", LAWS)
def test_a_run_that_left_nothing_out_says_so(how, fake, capsys):
    sampling, law = LAWS[how]
    fake.configure(sparse={"sparse_row_steps": 0})
    last = run(capsys, *KEEP, *sampling)[2].splitlines()[-1]
    assert last.startswith("verification was sparse, but no step") and last.endswith(f"so the output {law}")


def test_a_run_without_steps(fake, capsys):
    per_token = {name: None for name in SPARSE if name.endswith("per_token")}
    fake.configure(sparse={"row_steps": 0, "sparse_row_steps": 0} | per_token)
    code, _, err = run(capsys, *KEEP)
    assert code == 0 and "cache reads none" in err.splitlines()


@pytest.mark.parametrize("lossless, code", [(True, 0), (False, 1)])
def test_check_lossless(lossless, code, fake, capsys):
    fake.configure(lossless=lossless)
    got, out, err = run(capsys, *KEEP, "--check-lossless", "--json")
    assert got == code and json.loads(out)["lossless"]["lossless"] is lossless
    assert err.splitlines()[-1].startswith("lossless" if lossless else "NOT lossless")


def test_an_interrupted_run(fake, capsys):
    fake.configure(stop_after=1)
    code, _, err = run(capsys, *KEEP)
    assert code == 130 and "30 of 40 row-steps" in err


PROVENANCE = f"[provenance]\nmodel = 'smollm2-135m'\nmodel_sha256 = '{SHA}'\ntexts = [1, 2]"


@pytest.mark.parametrize("loaded, warned", [(SHA, False), (None, False), ("0" * 64, True)])
def test_provenance(loaded, warned, fake, capsys, file):
    fake.configure(sha256=loaded)
    path = file(PROVENANCE)
    code, _, err = run(capsys, "--prompt", "one", "--verify=sparse", "--sparsity", path)
    told = "model smollm2-135m, model_sha256 b179c9523d0e6a0…, texts [1, 2]"
    assert code == 0 and f"  the sparsity file says where its figures come from: {told}\n" in err
    assert ("warning: the sparsity file is about another model" in err) == warned
    if warned:
        assert "model_sha256 b179c9523d0e6a0…, but this one's is 000000000000000…" in err


def test_provenance_is_one_line_whatever_stands_there():
    provenance = (("note", "two\nlines"), ("texts", ["a"] * 40), ("model_sha256", 5), ("empty", ""))
    lines = provenance_lines(SparsityConfig(provenance=provenance), SHA)
    told = "note two lines, texts (40 of them), model_sha256 5, empty "
    assert lines[0].endswith(told) and len(lines) == 2
    assert not any("\n" in line for line in lines)


BAD = [
    (["--keep=0.5"], "--keep says how to verify sparsely; allowed: only with --verify sparse"),
    (["--sparsity=x.toml"], "--sparsity says how to verify sparsely"),
    (["--verify=sparse", "--keep=2"], "--keep 2.0 is not allowed; allowed: a number above 0, up to 1"),
    (["--verify=sparse", "--keep=1", "--rho=1"], "the command line gives both keep and rho"),
    (["--verify=sparse", "--sparsity=missing.toml"], "sparsity file 'missing.toml': No such file"),
    (["--verify=sparse", "--anchors=0,0"], "--anchors [0, 0] names a layer twice"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_is_one_line_before_the_model(arguments, message, fake, capsys):
    code, out, err = run(capsys, "--prompt", "one", *arguments)
    assert (code, out, fake.loaded) == (2, "", [])
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_a_bad_file_is_refused_before_jax_is_imported(file):
    path = file("[attention]\nkeep = 0")
    code = f"""if True:
        import sys
        from sv_jax import generate
        code = generate.main(["--verify=sparse", "--sparsity", {path!r}])
        sys.exit(code + ("jax" in sys.modules))
    """
    done = python(code)
    assert done.returncode == 2 and b"keep 0 is not allowed" in done.stderr
