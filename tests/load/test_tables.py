"""Tables that their libraries would not survive are refused before they are opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.errors import DataError
from optimizer.load import tables


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("closed", [True, False])
def test_deep_json_is_refused_with_its_line(tmp_path: Path, closed: bool) -> None:
    deep = "[" * 500 + "]" * (500 if closed else 0)
    file = written(tmp_path, "a.jsonl", f'{{"text": "a"}}\n{{"text": {deep}}}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: it is nested more than 100"):
        tables.check_depth(file)


def test_brackets_in_texts_are_no_depth(tmp_path: Path) -> None:
    rows = [{"text": "[{" * 300 + '"\\' + "[" * 300} for _ in range(3)]
    tables.check_depth(written(tmp_path, "a.jsonl", "".join(json.dumps(r) + "\n" for r in rows)))


def test_many_rows_are_no_depth(tmp_path: Path) -> None:
    tables.check_depth(written(tmp_path, "a.json", json.dumps([{"text": "a"}] * 1000)))


def test_a_csv_of_too_many_columns_is_refused(tmp_path: Path) -> None:
    tables.check_columns(written(tmp_path, "a.csv", ",".join("ab") + "\n"))
    with pytest.raises(DataError, match="2,000 columns"):
        tables.check_columns(written(tmp_path, "b.csv", "," * 1999 + "\n"))
