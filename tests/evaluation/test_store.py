"""Results that are kept: what is skipped, what is not, and what a killed run leaves."""

from __future__ import annotations

import json

import pytest

from sv_jax.config import UserError
from sv_jax.evaluation.store import Store, identity_key, tokens_hash

FIRST = {"case": "copy/a/96", "setting": {"keep": 0.1, "selector": "mean"}, "version": 1}
SECOND = {**FIRST, "case": "copy/b/96"}


def test_results_are_found_again(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    store = Store(path)
    assert store.get(FIRST) is None and len(store) == 0
    store.add([(FIRST, {"agreeing": 3}), (SECOND, {"agreeing": 4})])
    store.add([({**FIRST, "version": 2}, {"agreeing": 5})])
    for found in (store, Store(path)):
        assert [found.get(x) for x in (FIRST, SECOND)] == [{"agreeing": 3}, {"agreeing": 4}]
        assert len(found) == 3
    assert json.loads(path.read_text().splitlines()[0])["identity"] == FIRST


def test_the_key_is_made_of_every_value_and_of_no_order():
    turned = dict(reversed(FIRST.items()))
    assert identity_key(turned) == identity_key(FIRST)
    for other in (SECOND, {**FIRST, "setting": {"keep": 0.25, "selector": "mean"}}, {**FIRST, "seed": 0}):
        assert identity_key(other) != identity_key(FIRST)
    assert tokens_hash([1, 23]) != tokens_hash([12, 3])


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_is_dropped(tmp_path, cut):
    path = tmp_path / "results.jsonl"
    Store(path).add([(FIRST, 1), (SECOND, 2)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    store = Store(path)
    assert store.get(FIRST) == 1 and store.get(SECOND) is None
    store.add([(SECOND, 2)])
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", ["{", "[]", '{"key": "x"}', "3"])
def test_a_line_that_is_no_result_is_named(tmp_path, line):
    path = tmp_path / "results.jsonl"
    Store(path).add([(FIRST, 1)])
    path.write_text(path.read_text() + line + "\n" + path.read_text())
    with pytest.raises(UserError, match=r"results\.jsonl, line 2 is not a result; remove the line"):
        Store(path)


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"results .*: (Not a directory|File exists)"):
        Store(tmp_path / "file" / "results.jsonl")
    with pytest.raises(UserError, match="Is a directory"):
        Store(tmp_path)
