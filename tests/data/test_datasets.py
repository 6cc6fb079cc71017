"""From data specs to samples: the same rows everywhere, and a message for each bad set."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimizer.data import datasets as ours
from optimizer.data import tables
from optimizer.data.datasets import Sample, check_header, digest_rows, encode_batches, read_samples
from optimizer.data.same_rows import check_disjoint, drop_repeated
from optimizer.foundation.errors import DataError, MachineError
from optimizer.harness.contract import read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.recipe.schema import DataSpec
from tests.load.conftest import Load

ROWS = [{"text": f"text {i}", "label": i % 2, "note": i} for i in range(20)]
LABELLED = {"text": "text", "label": "label"}

Spec = Callable[..., DataSpec]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    """spec(rows) writes rows.jsonl and describes it."""

    def make(rows: list[dict[str, Any]], **fields: Any) -> DataSpec:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        fields = {"source": "json", "files": ("rows.jsonl",), **fields}
        return DataSpec(base=str(tmp_path), **fields)

    return make


def texts(rows: list[Sample]) -> list[str]:
    return [s.text for s in rows]


def refused(spec: DataSpec, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        read_samples(spec)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.where
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["csv", "json", "parquet", "text", "folder"])
def test_every_kind_of_file_gives_the_same_samples(kind: str, tmp_path: Path, spec: Spec) -> None:
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    jsonl = spec(ROWS)
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.csv.write_csv(table, tmp_path / "rows.csv")
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.text").write_text("".join(f"{r['text']}\n" for r in ROWS))
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.jsonl").rename(tmp_path / "folder/train.jsonl")
    if kind == "folder":
        asked = DataSpec(source="folder", base=str(tmp_path))
    else:
        file = "folder/train.jsonl" if kind == "json" else f"rows.{kind}"
        asked = DataSpec(source=kind, files=(file,), base=str(tmp_path))
    assert texts(read_samples(asked)) == [r["text"] for r in ROWS]
    del jsonl


def test_globs_take_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    asked = DataSpec(source="json", files=("*.jsonl",), base=str(tmp_path))
    assert texts(read_samples(asked)) == ["a", "b"]


def test_columns_are_mapped(spec: Spec) -> None:
    rows = [{"a": "one", "b": "two", "close": 0.5}]
    asked = spec(rows, columns={"text": "a", "text_pair": "b", "score": "close"})
    assert read_samples(asked) == [Sample("one", text_pair="two", score=0.5)]


def test_label_names_become_ids_in_the_order_given(spec: Spec) -> None:
    rows = [{"text": "x", "label": "neg"}, {"text": "y", "label": "pos"}]
    asked = spec(rows, columns=LABELLED, labels=("pos", "neg"))
    assert [s.label for s in read_samples(asked)] == [1, 0]


def test_words_and_tags_go_together(spec: Spec) -> None:
    rows = [{"text": ["New", "York"], "tags": ["B", "I"]}]
    asked = spec(rows, columns={"text": "text", "tags": "tags"}, labels=("O", "B", "I"))
    assert read_samples(asked) == [Sample("New York", words=("New", "York"), tags=(1, 2))]


def test_a_draw_is_seeded_nested_and_in_order(spec: Spec) -> None:
    asked = spec(ROWS)
    some, fewer = texts(read_samples(asked, limit=8)), texts(read_samples(asked, limit=3))
    assert len(some) == 8
    assert set(fewer) < set(some), "a smaller draw is part of a larger one"
    assert some == sorted(some, key=[r["text"] for r in ROWS].index)
    assert texts(read_samples(asked, limit=8, seed=0)) == some
    assert texts(read_samples(asked, limit=8, seed=1)) != some
    assert texts(read_samples(spec(ROWS, samples=8))) == some


def test_asking_for_more_than_there_is_says_so(
    spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(read_samples(spec(ROWS), limit=99)) == 20
    assert "samples is 99, but the data have 20 rows" in capsys.readouterr().err


def test_null_and_empty_rows_are_dropped_and_counted(
    spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS, {"text": None, "label": 0}, {"text": "  ", "label": 0}]
    rows += [{"text": "unlabelled", "label": None}]
    assert len(read_samples(spec(rows, columns=LABELLED))) == 20
    assert "3 of 23 rows dropped" in capsys.readouterr().err


def test_the_digest_is_of_the_rows_used_and_nothing_else(spec: Spec) -> None:
    before = digest_rows(spec(ROWS))
    other_column = [{**r, "note": "changed"} for r in ROWS]
    assert digest_rows(spec(other_column, attribution="changed")) == before
    assert digest_rows(spec([*ROWS[:-1], {"text": "changed"}])) != before
    assert digest_rows(spec(ROWS, samples=8)) != before
    assert digest_rows(spec(ROWS, columns=LABELLED)) != before


def test_a_file_that_changes_is_read_again(spec: Spec, tmp_path: Path) -> None:
    asked = spec(ROWS)
    assert len(read_samples(asked)) == 20
    (tmp_path / "rows.jsonl").write_text('{"text": "new"}\n')
    assert texts(read_samples(asked)) == ["new"]


def test_no_rows(spec: Spec) -> None:
    refused(spec([{"text": None}]), "rows.jsonl", "rows is usable", "columns")


def test_an_empty_file(spec: Spec) -> None:
    refused(spec([]), "rows.jsonl", "the file is empty")


def test_a_file_of_column_names_only_is_empty(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\n")
    asked = DataSpec(source="csv", files=("rows.csv",), base=str(tmp_path))
    refused(asked, "rows.csv", "the data are empty")


def test_a_file_that_is_no_json(spec: Spec, tmp_path: Path) -> None:
    asked = spec(ROWS)
    (tmp_path / "rows.jsonl").write_text("{broken\n")
    refused(asked, "rows.jsonl", "cannot be read")


def test_a_missing_file_names_the_closest(spec: Spec) -> None:
    spec(ROWS)
    refused(spec(ROWS, files=("row.jsonl",)), "no file 'row.jsonl'", 'did you mean "rows.jsonl"')
    told = spec(ROWS, files=("row.jsonl",), obtain="python make_rows.py")
    refused(told, "no file 'row.jsonl'", "Get it first: python make_rows.py")


def test_files_that_were_forgotten(spec: Spec) -> None:
    refused(spec(ROWS, files=()), "files is missing")


def test_a_missing_column_names_the_closest(spec: Spec) -> None:
    asked = spec(ROWS, columns={"text": "texts"})
    refused(asked, "columns.text", "no column 'texts'", 'did you mean "text"?', "label, note")


def test_an_unknown_field_names_the_closest(spec: Spec) -> None:
    asked = spec(ROWS, columns={"text": "text", "lable": "label"})
    refused(asked, "unknown field 'lable'", 'did you mean "label"?', "text_pair")


def test_a_spec_without_text(spec: Spec) -> None:
    refused(
        spec(ROWS, columns={"label": "label"}), "none of text, image, messages, arrays has a column"
    )


def test_an_unknown_split(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_text('{"text": "x"}\n')
    refused(DataSpec(source="set", base=str(tmp_path), split="tset"), "set", "tset", "train")


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("positiv", ["row 0: label", "'positiv'", 'did you mean "positive"?']),
        (2, ["row 0: label", "2 is not a label id", "0..1"]),
        (-1, ["-1 is not a label id"]),
        (0.5, ["0.5 is not a label id"]),
        ([1], ["row 0: label", "[1] is not a label id"]),
        (math.nan, ["row 0: label", "nan is not a label id"]),
    ],
)
def test_a_label_that_is_none(spec: Spec, label: Any, words: list[str]) -> None:
    rows = [{"text": "x", "label": label}]
    refused(spec(rows, columns=LABELLED, labels=("negative", "positive")), *words)


def test_a_score_that_is_no_number(spec: Spec) -> None:
    rows = [{"text": "x", "score": "high"}]
    asked = spec(rows, columns={"text": "text", "score": "score"})
    refused(asked, "row 0: score", "'high'", "a number")


@pytest.mark.parametrize(("text", "tags"), [(["New", "York"], [0]), (["New"], 0), ("New", [])])
def test_tags_without_their_words(spec: Spec, text: Any, tags: Any) -> None:
    rows = [{"text": text, "tags": tags}]
    refused(spec(rows, columns={"text": "text", "tags": "tags"}), "row 0: tags", "equal length")


def test_a_pair_that_is_no_text(spec: Spec) -> None:
    rows = [{"text": "x", "b": ["y"]}]
    refused(spec(rows, columns={"text": "text", "text_pair": "b"}), "text_pair", "is not a string")


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.text").write_text(f"{name}\n")
    files = ("b.text", "*.text", "./b.text")
    asked = DataSpec(source="text", files=files, base=str(tmp_path))
    assert [Path(f).name for f in tables.list_files(asked)] == ["b.text", "a.text"]


def test_files_may_have_other_columns_beside_those_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "labelled.jsonl").write_text('{"label": 1, "text": "two"}\n')
    (tmp_path / "other.jsonl").write_text('{"words": "three"}\n')
    spec = DataSpec(source="json", files=("plain.jsonl", "labelled.jsonl"), base=str(tmp_path))
    assert [row.text for row in read_samples(spec)] == ["one", "two"]
    wrong = spec.model_copy(update={"files": ("plain.jsonl", "other.jsonl")})
    with pytest.raises(DataError, match=r"other.jsonl.*no column 'text'"):
        read_samples(wrong)


def test_repeated_rows_are_dropped_and_counted(
    spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    again = [{"text": "text 0", "label": 0, "note": 0}, {"text": "text 1", "label": 0, "note": 0}]
    asked = spec([*ROWS, *again], columns=LABELLED)
    assert texts(read_samples(asked)) == texts(read_samples(spec(ROWS)))
    said = capsys.readouterr().err
    assert "2 of 22 rows dropped: the same text" in said
    assert "1 of them have another label" in said
    assert digest_rows(spec([*ROWS, *again], columns=LABELLED)) == digest_rows(
        spec(ROWS, columns=LABELLED)
    )


def test_one_text_with_two_pairs_is_two_rows(spec: Spec) -> None:
    rows = [{"a": "x", "b": "y"}, {"a": "x", "b": "z"}]
    assert len(read_samples(spec(rows, columns={"text": "a", "text_pair": "b"}))) == 2


def test_a_hub_set_is_read_at_the_commit_its_revision_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets
    import huggingface_hub

    read: list[str] = []

    def info(_: Any, name: str, revision: str | None) -> Any:
        return SimpleNamespace(sha={"me/set": "c" * 40}[name] if revision == "v1" else "d" * 40)

    def load(_: str, name: str | None, *, split: str, revision: str) -> Any:
        read.append(revision)
        return datasets.Dataset.from_dict({"text": [revision]})

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    for revision in ("v1", None, "a" * 40):
        read_samples(DataSpec(source="me/set", revision=revision))
    assert read == ["c" * 40, "d" * 40, "a" * 40]
    tables._commit.cache_clear()
    ours._load.cache_clear()


def test_a_hub_set_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(MachineError, match=r"data no/such-set: .*HF_HUB_OFFLINE"):
        read_samples(DataSpec(source="no/such-set"))


def test_sets_with_a_text_in_common_are_refused() -> None:
    sets = {
        "calibrate": [Sample("A good day."), Sample("b")],
        "evaluate": [Sample("c"), Sample("A good day.")],
    }
    with pytest.raises(DataError, match=r"evaluate data: 'A good day\.' is also in the calibrate"):
        check_disjoint(sets)


def uncased(texts: Sequence[str]) -> list[list[int]]:
    return [list(text.lower().encode()) for text in texts]


def cased(texts: Sequence[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def test_texts_are_one_where_the_tokenizer_makes_them_one_and_only_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SMILES can differ in case alone: C is carbon, c an aromatic one."""
    rows = [Sample("CCO"), Sample("cco")]
    sets = {"calibrate": rows[:1], "evaluate": rows[1:]}
    for ids in (None, cased):
        check_disjoint(sets, ids)
        assert drop_repeated(rows, "data", ids) == rows
    with pytest.raises(DataError, match=r"'cco' is also in the .* \(the same token ids\)"):
        check_disjoint(sets, uncased)
    assert drop_repeated(rows, "data", uncased) == rows[:1]
    assert "1 of 2 rows dropped: the same token ids" in capsys.readouterr().err


def test_a_text_on_either_side_of_a_pair_is_in_common() -> None:
    pair = [Sample("a", text_pair="b"), Sample("a", text_pair="c")]
    for other in (Sample("b"), Sample("x", text_pair="a")):
        with pytest.raises(DataError, match="is also in the calibrate data"):
            check_disjoint({"calibrate": pair, "evaluate": [other]})
    check_disjoint({"calibrate": pair, "evaluate": [Sample("x", text_pair="y"), Sample("z")]})


def test_queries_may_share_documents_and_parts_no_query() -> None:
    row, other = Sample("query", text_pair="a"), Sample("another", text_pair="a")
    check_disjoint({"calibrate": [row], "evaluate": [other]}, ranks=True)
    with pytest.raises(DataError, match="'query' is also in the calibrate data"):
        check_disjoint(
            {"calibrate": [row], "evaluate": [Sample("query", text_pair="b")]}, ranks=True
        )


@pytest.mark.parametrize("disabled", [True, False])
def test_progress_bars_stay_as_they_were_and_nothing_is_printed(
    spec: Spec, capfd: pytest.CaptureFixture[str], disabled: bool
) -> None:
    import datasets

    was = datasets.are_progress_bars_disabled()
    switch = {True: datasets.disable_progress_bars, False: datasets.enable_progress_bars}
    switch[disabled]()
    read_samples(spec(ROWS))
    assert datasets.are_progress_bars_disabled() == disabled
    switch[was]()
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_reading_files_leaves_nothing_in_the_users_cache(spec: Spec) -> None:
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before = sorted(os.listdir(cache)) if cache.is_dir() else None
    read_samples(spec([*ROWS, {"text": "not read before"}]))
    assert (sorted(os.listdir(cache)) if cache.is_dir() else None) == before


def test_batches_are_padded_to_their_own_longest_and_cut(load: Load, tiny_bert: Path) -> None:
    out = load(tiny_bert)
    contract = read(out / "contract.json")
    tokenizer = load_tokenizer(out / "checkpoint", contract)
    rows = [Sample("good"), Sample("a good day"), Sample("bad " * 30)]
    shapes = [b["input_ids"].shape for b in encode_batches(rows, contract, tokenizer, 2, 10)]
    assert shapes == [(2, 5), (1, 10)]
    pair = next(iter(encode_batches([Sample("a", text_pair="the")], contract, tokenizer, 1, 10)))
    assert pair["token_type_ids"].tolist() == [[0, 0, 0, 1, 1]]


def test_words_need_no_tags(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text(json.dumps({"words": ["a", "good", "film"]}) + "\n")
    spec = DataSpec(source="json", files=(str(file),), columns={"text": "words"})
    (row,) = read_samples(spec)
    assert (row.text, row.words, row.tags) == ("a good film", ("a", "good", "film"), None)


@pytest.mark.parametrize(
    ("columns", "labels", "words"),
    [
        ({"text": "text", "label": "lable"}, (), "no column 'lable'"),
        ({"text": "text", "tags": "tags"}, ("B", "I"), "tags and text are not both lists"),
        ({"text": "words", "tags": "name"}, ("a", "b"), "tags and text are not both lists"),
    ],
)
def test_columns_that_cannot_be_read_are_refused_by_the_header(
    spec: Spec, columns: dict[str, str], labels: tuple[str, ...], words: str
) -> None:
    rows = [{"text": "x", "name": "a", "id": 1, "words": ["New", "York"], "tags": ["B", "I"]}]
    with pytest.raises(DataError, match=words):
        check_header(spec(rows, columns=columns, labels=labels))


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({"text": "text", "label": "id"}, ()),
        ({"text": "text", "label": "name"}, ("a", "b")),
        ({"text": "words", "tags": "tags"}, ("B", "I")),
    ],
)
def test_a_header_that_can_be_read_is_accepted_and_its_rows_are_too(
    spec: Spec, columns: dict[str, str], labels: tuple[str, ...]
) -> None:
    rows = [{"text": "x", "name": "a", "id": 1, "words": ["New", "York"], "tags": ["B", "I"]}]
    asked = spec(rows, columns=columns, labels=labels)
    check_header(asked)
    assert len(read_samples(asked)) == 1


def test_data_on_a_hub_are_not_fetched_for_their_header() -> None:
    check_header(DataSpec(source="nobody/has-this", columns={"text": "no such column"}))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"text": [{"role": "user", "content": "hi"}], "label": 0}, "is not a string"),
        ({"text": "hi", "label": -1}, "'?-1'? is not a label id"),
        ({"text": "hi", "label": 0.5}, "0.5 is not a label id"),
    ],
)
def test_check_says_of_the_first_rows_what_run_would(
    spec: Spec, row: dict[str, Any], found: str
) -> None:
    asked = spec([row, {**row, "label": 1}], columns=LABELLED)
    for reader in (check_header, read_samples):
        with pytest.raises(DataError, match=found):
            reader(asked)


@pytest.mark.parametrize("value", [True, False])
def test_true_is_not_a_text(value: bool, spec: Spec) -> None:
    refused(spec([{"text": value}] * 3), "is not a string")
