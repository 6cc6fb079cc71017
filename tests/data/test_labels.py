"""A label of the data is the model's label of the same name, or it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from optimizer.data.datasets import Sample, map_labels, read_samples
from optimizer.foundation.errors import CheckpointError, DataError
from optimizer.recipe.schema import DataSpec
from tests.load.conftest import Load, edit_json

MODEL = ("negative", "positive")


def rows(folder: Path, given: list[Any], **fields: Any) -> DataSpec:
    """A spec of rows with these labels; lists of them are tags."""
    field = "tags" if isinstance(given[0], list) else "label"
    lines = []
    for i, label in enumerate(given):
        text = [f"w{i}{j}" for j in range(len(label))] if field == "tags" else f"text {i}"
        lines.append(json.dumps({"text": text, field: label}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    columns = {"text": "text", field: field}
    return DataSpec(
        source="json", files=("rows.jsonl",), base=str(folder), columns=columns, **fields
    )


def ids(spec: DataSpec, labels: tuple[str, ...] | None = MODEL) -> list[Any]:
    made = map_labels(read_samples(spec), spec, labels)
    return [s.label if s.tags is None else s.tags for s in made]


@pytest.mark.parametrize("given", [[0, 1], ["positive", "negative"]])
@pytest.mark.parametrize("names", [("positive", "negative"), ("Positive", "NEGATIVE")])
def test_labels_in_another_order_are_matched_by_name(
    tmp_path: Path, given: list[Any], names: tuple[str, ...]
) -> None:
    given = [g if isinstance(g, int) else names[MODEL[::-1].index(g)] for g in given]
    assert ids(rows(tmp_path, given, labels=names)) == [1, 0]


def test_tags_are_matched_by_name(tmp_path: Path) -> None:
    spec = rows(tmp_path, [[0, 1], [2, 0]], labels=("O", "B", "I"))
    assert ids(spec, ("B", "I", "O")) == [(2, 0), (1, 2)]


def test_names_that_differ_in_case_only_are_told_apart(tmp_path: Path) -> None:
    assert ids(rows(tmp_path, [0, 1], labels=("us", "US")), ("US", "us")) == [1, 0]


def test_names_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\['bad', 'good'\].*\['negative', 'positive'\]"):
        ids(rows(tmp_path, [0, 1], labels=("bad", "good")))


@pytest.mark.parametrize("labels", [[0, 2], [[0, 1], [0, 2]]])
def test_an_id_that_the_model_lacks_is_refused(tmp_path: Path, labels: list[Any]) -> None:
    with pytest.raises(
        DataError, match=r"label id 2 was found, but the model has 2 labels.*0\.\.1"
    ):
        ids(rows(tmp_path, labels))


def test_ids_without_names_are_the_models(tmp_path: Path) -> None:
    assert ids(rows(tmp_path, [1, 0])) == [1, 0]


def test_a_model_that_names_no_label_takes_the_datas_names_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = rows(tmp_path, ["bad", "good"], labels=("bad", "good"))
    assert ids(spec, ("LABEL_0", "LABEL_1")) == [0, 1]
    assert "has no label names; its outputs are read as bad, good" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["positive", "POSITIVE"], [["positive"], ["positive"]]])
def test_names_in_the_cells_are_the_models_where_some_are_missing(
    tmp_path: Path, given: list[Any]
) -> None:
    assert ids(rows(tmp_path, given)) == ([1, 1] if isinstance(given[0], str) else [(1,), (1,)])


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_names_are_read_from_every_kind_of_file(tmp_path: Path, source: str) -> None:
    file = tmp_path / f"rows.{source}"
    if source == "csv":
        file.write_text("text,label\na,positive\nb,negative\n")
    else:
        pq.write_table(pa.table({"text": ["a", "b"], "label": ["positive", "negative"]}), file)
    columns = {"text": "text", "label": "label"}
    spec = DataSpec(source=source, files=(file.name,), base=str(tmp_path), columns=columns)
    assert ids(spec) == [1, 0]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (MODEL, "label .positiv., and the model.s are .*did you mean .positive"),
        (("LABEL_0", "LABEL_1"), r"Set the label names in id order"),
        (None, "the model has no labels"),
    ],
)
def test_names_in_the_cells_that_the_model_lacks_are_refused(
    tmp_path: Path, model: tuple[str, ...] | None, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        ids(rows(tmp_path, ["positiv", "negative"]), model)


def test_a_model_without_labels_and_rows_without_them_change_nothing(tmp_path: Path) -> None:
    spec = rows(tmp_path, [0, 7], labels=())
    assert ids(spec, None) == [0, 7]
    assert map_labels([Sample("x", score=0.5)], spec, ("LABEL_0",)) == [Sample("x", score=0.5)]


def test_names_the_data_set_declares_are_matched_and_not_reordered(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(MODEL[::-1]))}
    )
    table = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [0, 1]}, features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    spec = DataSpec(
        source="parquet",
        files=("rows.parquet",),
        base=str(tmp_path),
        columns={"text": "text", "label": "label"},
    )
    assert ids(spec) == [1, 0]
    with pytest.raises(DataError, match=r"in the data set, \['positive', 'negative'\]"):
        read_samples(spec.model_copy(update={"labels": MODEL}))


def test_two_ids_of_one_name_in_a_checkpoint_are_refused(
    load: Load, tiny_classifier: Path, tmp_path: Path
) -> None:
    bert = shutil.copytree(tiny_classifier, tmp_path / "bert")
    edit_json(bert / "config.json", id2label={"0": "X", "1": "X"}, label2id={"X": 1})
    with pytest.raises(CheckpointError, match="the name 'X'"):
        load(bert, "text-classification")
