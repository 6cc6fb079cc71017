"""A Parquet file is refused by its footer, or after a bounded part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from optimizer.data import parquet_file, table_checks, tables
from optimizer.data.datasets import read_samples
from optimizer.foundation.errors import DataError
from optimizer.recipe.schema import DataSpec


def written(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pa.table(columns), folder / "a.parquet", **options)
    return folder / "a.parquet"


def repeated(value: str, count: int) -> Any:
    """A column of equal strings, in the memory of one."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int8)), pa.array([value]))


def spec(folder: Path, **columns: str) -> DataSpec:
    return DataSpec(source="parquet", files=("a.parquet",), base=str(folder), columns=columns)


@pytest.mark.parametrize(
    ("count", "value", "found"),
    [(50_001, "a", "50,001 rows"), (50_000, "x" * 100, "unpacks to more than 1,000,000 bytes")],
)
@pytest.mark.parametrize("plain", [True, False])
def test_equal_strings_in_a_small_file_are_refused_before_they_are_a_table(
    plain: bool, count: int, value: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_file, "ROWS", 50_000)
    monkeypatch.setattr(table_checks, "UNPACKED", 1_000_000)
    monkeypatch.setattr(table_checks, "TIMES", 100)
    monkeypatch.setattr(tables, "_of_files", lambda *_, **__: pytest.fail("it was read"))
    texts = repeated(value, count)
    file = written(tmp_path, {"text": texts.dictionary_decode() if plain else texts})
    assert file.stat().st_size < 20_000
    with pytest.raises(DataError, match=found):
        read_samples(spec(tmp_path, text="text"))


def test_one_long_string_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_file, "VALUE", 1_000_000)
    text = "".join(map(str, range(300_000)))
    written(tmp_path, {"text": [text]}, compression="none")
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(DataError, match=r"column 'text' has more than 1,000,000 bytes"):
        read_samples(spec(tmp_path, text="text"))


def test_one_long_string_among_short_ones_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_file, "VALUE", 1_000_000)
    text = "".join(map(str, range(300_000)))
    for rows in ([*("a" * n for n in range(99)), text], [["a"]] * 99 + [[text]]):
        written(tmp_path, {"text": rows})
        with pytest.raises(DataError, match="column 'text' has more than"):
            read_samples(spec(tmp_path, text="text"))


def test_more_columns_than_the_documentation_says_are_refused(tmp_path: Path) -> None:
    written(tmp_path, {"text": ["a"], **{f"c{i}": [i] for i in range(table_checks.COLUMNS)}})
    with pytest.raises(DataError, match="1,001 columns"):
        read_samples(spec(tmp_path, text="text"))
    inside = pa.array([{f"c{i}": i for i in range(table_checks.COLUMNS)}])
    written(tmp_path, {"text": ["a"], "c": inside})
    with pytest.raises(DataError, match="1,001 columns"):
        read_samples(spec(tmp_path, text="text"))


def test_only_the_named_columns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that unpacks to too many bytes is ignored if the spec does not name it."""
    monkeypatch.setattr(table_checks, "UNPACKED", 500_000)
    monkeypatch.setattr(table_checks, "TIMES", 10)
    large, texts = repeated("x" * 1000, 2000), [f"text {i}" for i in range(2000)]
    written(tmp_path, {"large": large, "text": texts, "label": np.zeros(2000, np.int8)})
    rows = read_samples(spec(tmp_path, text="text", label="label"))
    assert [r.text for r in rows] == texts
    with pytest.raises(DataError, match="unpacks to more than"):
        read_samples(spec(tmp_path, text="large"))


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    written(tmp_path, {"words": ["a"], "label": [0]})
    with pytest.raises(DataError, match=r"no column 'text' .*(?s:.)*words, label"):
        read_samples(spec(tmp_path, text="text"))


@pytest.mark.parametrize("seed", range(3))
def test_changed_files_end_in_a_sentence(seed: int, tmp_path: Path) -> None:
    """Bytes changed anywhere, mostly in the footer."""
    file = written(tmp_path, {"text": [f"a {i}" for i in range(50)]})
    good, random, refused = file.read_bytes(), np.random.default_rng(seed), list[str]()
    for _ in range(30):
        changed = bytearray(good)
        for _ in range(int(random.integers(1, 4))):
            changed[-1 - int(random.integers(8, min(700, len(good))))] = int(random.integers(256))
        file.write_bytes(changed)
        try:
            read_samples(spec(tmp_path, text="text"))
        except DataError as e:
            refused.append(str(e))
    assert len(refused) > 3
    assert all("a.parquet" in message for message in refused)
