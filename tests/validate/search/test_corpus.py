"""A corpus or a form on which a search proves nothing is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.data.sample import Sample
from optimizer.foundation.errors import DataError, RecipeError
from optimizer.harness.contract import Contract, TensorSpec
from optimizer.harness.embedding_settings import EmbeddingSettings
from optimizer.recipe.data import DataSpec
from optimizer.recipe.embeddings import Embeddings
from optimizer.validate.search import corpus

OUTPUT = TensorSpec("last_hidden_state", "float32", ("batch", "sequence", 16))
CONTRACT = Contract("sentence-embedding", (), (OUTPUT,), pooling="mean", normalize=True)
DOCUMENTS = [f"document {i}" for i in range(30)]


def section(folder: Path, queries: list[dict[str, Any]], **fields: Any) -> Embeddings:
    """A section on files in `folder`. queries: rows of query, document and score"""
    names = {"text": "query", "text_pair": "document", "score": "score"}
    columns = {field: name for field, name in names.items() if name in queries[0]}
    specs = {}
    for name, rows, mapped in (
        ("queries", queries, columns),
        ("documents", [{"text": text} for text in DOCUMENTS], {"text": "text"}),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = (str(folder / f"{name}.jsonl"),)
        specs[name] = DataSpec(source="json", files=files, columns=mapped)
    return Embeddings(**{"type": "int8", "k": 2, **specs, **fields})


def test_relevance_is_read_by_query(tmp_path: Path) -> None:
    rows = [
        {"query": "one", "document": "document 3", "score": 2},
        {"query": "one", "document": "document 5", "score": 0},
        {"query": "two", "document": "document 5", "score": 0},
    ]
    read = corpus.read(section(tmp_path, rows), CONTRACT, None, [])
    assert (list(read.queries), read.left_out) == (["one"], 1)
    assert read.relevant == [{read.documents.index("document 3"): 2.0}]


@pytest.mark.parametrize(
    ("rows", "fields", "words"),
    [
        ([{"query": "q"}], {"k": 10}, "30 documents are no more than k x oversampling, 40"),
        ([{"query": "q", "document": "absent"}], {}, "'absent' .* is not among the documents"),
        ([{"query": "q", "document": "document 1", "score": -1}], {}, "score is -1"),
        ([{"query": "q", "document": "document 1", "score": 0}], {}, "none of 1 queries"),
    ],
)
def test_a_corpus_that_cannot_judge_is_refused(
    rows: list[dict[str, Any]], fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        corpus.read(section(tmp_path, rows, **fields), CONTRACT, None, [])


@pytest.mark.parametrize(
    ("similarity", "unit", "fields", "words"),
    [
        ("cosine", True, {"dimensions": (16, 17)}, "17, and the model's vectors have 16"),
        ("manhattan", True, {}, "by manhattan distance"),
        ("euclidean", False, {}, "by euclidean distance"),
        ("dot", False, {"type": "binary"}, "bits have none"),
        (None, False, {}, "Set model.normalize: true"),
    ],
)
def test_a_form_that_does_not_rank_as_the_model_does_is_refused(
    similarity: str | None, unit: bool, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = section(tmp_path, [{"query": "q"}], **fields)
    vectors = EmbeddingSettings(similarity=similarity)
    with pytest.raises(RecipeError, match=words):
        corpus.check_forms(made, replace(CONTRACT, embedding=vectors, normalize=unit))
    if not fields.get("dimensions"):
        unit_cosine = replace(CONTRACT, embedding=None)
        corpus.check_forms(made, unit_cosine)


def test_a_query_that_the_model_learned_from_is_refused(tmp_path: Path) -> None:
    made = section(tmp_path, [{"query": "one"}, {"query": "two"}])
    with pytest.raises(DataError, match="'two' is also in the calibration or training data"):
        corpus.read(made, CONTRACT, None, [Sample("two")])


def test_margins_are_those_of_forms(tmp_path: Path) -> None:
    margins = {"int8": 0.1, "int8.8": 0.3}
    made = section(tmp_path, [{"query": "q"}], dimensions=(16, 8), max_drop=margins)
    assert [made.margin("int8", size) for size in (16, 8)] == [0.1, 0.3]
    with pytest.raises(ValueError, match=r"'int8.4' is not one of int8, int8.16, int8.8"):
        section(tmp_path, [{"query": "q"}], dimensions=(16, 8), max_drop={"int8.4": 0.1})
