"""Generated texts beside dense verification's, on a tiny model."""

from __future__ import annotations

import pytest

import sv_jax
from sv_jax.evaluation.cutting import Case
from sv_jax.evaluation.free_running import common_prefix, run_freely
from tests.engine import tiny_directory
from tests.evaluation.measurements import setting


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_directory.write(tmp_path_factory.mktemp("tiny"))
    return sv_jax.load_model(str(folder), cache_directory=tmp_path_factory.mktemp("cache"), progress=False)


def test_a_full_budget_changes_nothing_and_a_small_one_does(model):
    (ids,) = tiny_directory.random_prompts(600)
    case = Case("copy/a/600", "copy", "a", tuple(ids), 100)
    settings = [setting("mean", 1.0, 16), setting("bound", 0.1, 16, score="mean")]
    full, small = run_freely(model, case, settings, num_tokens=24, num_speculative_tokens=3)
    assert full.identical and full.tokens == 24 and full.steps == full.dense_steps > 0
    assert (small.case, small.context, small.setting) == ("copy/a/600", 600, settings[1])
    assert small.same_tokens < 24 and not small.identical
    assert small.bytes_per_token < 0.5 * small.dense_bytes_per_token
    dense = model.generate([ids[:500]], max_new_tokens=24, num_speculative_tokens=3, ignore_eos=True)
    assert sum(dense.stats.acceptance_histogram) == small.dense_steps


def test_nothing_is_generated_where_nothing_is_asked_for():
    assert (
        list(run_freely(None, Case("a/b/1", "a", "b", (1, 2), 1), [], num_tokens=1, num_speculative_tokens=1))
        == []
    )


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
