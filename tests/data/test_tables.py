"""Tables that their libraries would not survive are refused before they are opened."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from optimizer.data import table_checks, tables
from optimizer.foundation.errors import DataError
from optimizer.recipe.schema import DataSpec


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("closed", [True, False])
def test_deep_json_is_refused_with_its_line(tmp_path: Path, closed: bool) -> None:
    deep = "[" * 500 + "]" * (500 if closed else 0)
    file = written(tmp_path, "a.jsonl", f'{{"text": "a"}}\n{{"text": {deep}}}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: it is nested more than 100"):
        table_checks.check_depth(file)


def test_brackets_in_texts_are_no_depth(tmp_path: Path) -> None:
    rows = [{"text": "[{" * 300 + '"\\' + "[" * 300} for _ in range(3)]
    table_checks.check_depth(
        written(tmp_path, "a.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    )


def test_many_rows_are_no_depth(tmp_path: Path) -> None:
    table_checks.check_depth(written(tmp_path, "a.json", json.dumps([{"text": "a"}] * 1000)))


def test_a_csv_of_too_many_columns_is_refused(tmp_path: Path) -> None:
    table_checks.check_columns(written(tmp_path, "a.csv", ",".join("ab") + "\n"))
    with pytest.raises(DataError, match="2,000 columns"):
        table_checks.check_columns(written(tmp_path, "b.csv", "," * 1999 + "\n"))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files_are_checked_as_what_they_hold(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    rows = b"".join(b'{"text": "a %d"}\n' % i for i in range(20_000))
    good, deep, wide = tmp_path / "good.gz", tmp_path / "deep.gz", tmp_path / "wide.gz"
    good.write_bytes(pack(rows))
    table_checks.check_depth(good)
    deep.write_bytes(pack(rows + b"[" * 200))
    with pytest.raises(DataError, match=r"deep\.gz:20001: it is nested"):
        table_checks.check_depth(deep)
    wide.write_bytes(pack(b"text\n" + b"," * 2000))
    with pytest.raises(DataError, match=r"wide\.gz:2: it has 1,001 fields"):
        table_checks.check_columns(wide)


def test_damaged_gzip_is_refused_by_its_name(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(random.Random(0).randbytes(10_000)))
    content[-6] ^= 1  # of the checksum
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.gz: it cannot be read"):
        table_checks.check_depth(tmp_path / "a.gz")


def test_what_unfolds_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"\n" * 10_000_000) * 12)
    for check in (table_checks.check_depth, table_checks.check_columns):
        with pytest.raises(DataError, match="unpacks to more than 100,000,000"):
            check(tmp_path / "a.xz")


def test_an_open_string_of_escaped_quotes_is_read_once(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", '{"text": "' + '\\"' * 1_000_000)
    started = time.monotonic()
    table_checks.check_depth(file)
    assert time.monotonic() - started < 5


def test_a_string_may_lie_across_what_is_read_together(tmp_path: Path) -> None:
    for before in range(3):  # an escape is cut in two, or not
        text = "x" * before + '\\"' * table_checks.CHUNK + "[" * 200
        table_checks.check_depth(written(tmp_path, "a.json", f'{{"text": "{text}"}}'))
        deep = f'{{"text": "{text}", "a": {"[" * 200}'
        with pytest.raises(DataError, match="nested"):
            table_checks.check_depth(written(tmp_path, "b.json", deep))


@pytest.mark.parametrize(
    "document",
    [
        json.dumps({f"c{i}": 1 for i in range(1001)}),
        "\n".join(json.dumps({f"c{i}": 1}) for i in range(1001)),
        json.dumps({"a": [{f"c{i}": {"b": 1}} for i in range(501)]}),
    ],
)
def test_json_of_too_many_names_is_refused(tmp_path: Path, document: str) -> None:
    with pytest.raises(DataError, match="more than 1,000 columns"):
        table_checks.check_depth(written(tmp_path, "a.json", document))


def test_names_of_many_rows_count_once(tmp_path: Path) -> None:
    row = {"text": "a", "more": [{"x": 1}, {"x": 2}], "label": {"x": {"x": 1}}}
    table_checks.check_depth(written(tmp_path, "a.json", json.dumps([row] * 2000)))


def test_separators_in_quotes_are_no_cells(tmp_path: Path) -> None:
    long = '"' + 'a, ""b""\n,' * 2000 + '"'
    rows = f'text,label\n{long},1\n5" of it,0\n{long},"{"," * 2000}"\n'
    table_checks.check_columns(written(tmp_path, "a.csv", rows))
    with pytest.raises(DataError, match=r"b\.csv:\d+: it has 1,001 fields"):
        table_checks.check_columns(written(tmp_path, "b.csv", rows + long + "," * 1000))


def test_a_row_across_many_lines_is_one_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1,001 fields"):
        table_checks.check_columns(written(tmp_path, "a.csv", "text\n" + '"\n",,,' * 500))


def folder_spec(folder: Path) -> DataSpec:
    return DataSpec(source=str(folder), columns={"text": "text"})


def deep_rows(folder: Path) -> None:
    written(folder, "train.jsonl", '{"text": "a"}\n{"text":' + "[" * 50_000)


def wide_rows(folder: Path) -> None:
    written(folder, "train.tsv", "text\tlabel\n" + "\t" * 100_000)


def damaged(folder: Path) -> None:
    content = bytearray(gzip.compress(random.Random(0).randbytes(10_000)))
    content[-6] ^= 1
    (folder / "train.jsonl.gz").write_bytes(content)


def bad_configs(folder: Path) -> None:
    written(folder, "README.md", "---\nconfigs: 7\n---\n")
    written(folder, "train.jsonl", '{"text": "a"}\n')


def damaged_elsewhere(folder: Path) -> None:
    (folder / "train.parquet").write_bytes(b"PAR1 no PAR1")


FOLDERS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda folder: None,
    "no data": lambda folder: written(folder, "a.bin", "a"),
    "a broken link": lambda folder: (folder / "train.jsonl").symlink_to("nowhere"),
    "bad configs": bad_configs,
    "deep rows": deep_rows,
    "wide rows": wide_rows,
    "a damaged file": damaged,
    "no parquet": damaged_elsewhere,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "ds").mkdir()
    FOLDERS[name](tmp_path / "ds")
    with pytest.raises(DataError, match="ds"):
        tables.open_table(folder_spec(tmp_path / "ds"))


def test_a_folder_of_compressed_rows_is_read(tmp_path: Path) -> None:
    rows = b"".join(b'{"text": "a %d"}\n' % i for i in range(20_000))
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(rows))
    written(tmp_path, "vocab.json", json.dumps({f"c{i}": i for i in range(2000)}))
    assert len(tables.open_table(folder_spec(tmp_path))) == 20_000


def test_a_folder_of_too_many_files_is_refused_at_once(tmp_path: Path) -> None:
    for i in range(tables.FILES + 1):
        (tmp_path / f"{i}.jsonl").touch()
    with pytest.raises(DataError, match="more than 10,000 files"):
        tables.open_table(folder_spec(tmp_path))


@pytest.mark.parametrize("before", [0, 3, 200_000])
def test_a_csv_with_a_nul_is_refused_with_its_line(before: int, tmp_path: Path) -> None:
    """The csv reader would end the cell at a NUL without an error."""
    text = "text\n" + "a good film\n" * before + "a\0b\n"
    with pytest.raises(DataError, match=rf"a\.csv:{before + 2}: a NUL"):
        table_checks.check_columns(written(tmp_path, "a.csv", text))


COLUMNS = {"text": "review", "label": "stars"}


@pytest.mark.parametrize("sign", tables.SEPARATORS)
@pytest.mark.parametrize("packed", [False, True])
def test_cells_are_separated_by_the_sign_that_gives_the_columns(
    tmp_path: Path, sign: str, packed: bool
) -> None:
    """The first line has commas too, in a column that is not read."""
    text = f'review{sign}"a, b, c, d"{sign}stars\n"good; cheap, and | fast"{sign}x{sign}1\n'
    file = tmp_path / ("a.csv.gz" if packed else "a.csv")
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    spec = DataSpec(source="csv", files=(str(file),), columns=COLUMNS)
    (row,) = tables.open_table(spec)
    assert (row["review"], row["stars"]) == ("good; cheap, and | fast", 1)


def test_a_separator_of_the_spec_is_used_as_it_is(tmp_path: Path) -> None:
    file = written(tmp_path, "a.csv", "review~stars\nfine~2\n")
    spec = DataSpec(source="csv", files=(str(file),), columns=COLUMNS, separator="~")
    assert [*tables.open_table(spec)] == [{"review": "fine", "stars": 2}]


def test_without_the_columns_the_separator_is_that_of_the_most_cells(tmp_path: Path) -> None:
    file = written(tmp_path, "a.csv", "one, two;three;four\n1;2;3\n")
    assert tables.detect_separator(DataSpec(source="csv", files=(str(file),)), file) == ";"


def test_another_encoding_is_refused_with_the_key_and_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("review,stars\ncafé,1\n".encode("cp1252"))
    spec = DataSpec(source="csv", files=(str(tmp_path / "a.csv"),), columns=COLUMNS)
    with pytest.raises(DataError, match=r"not UTF-8 .* Set encoding"):
        tables.open_table(spec)
    read = tables.open_table(spec.model_copy(update={"encoding": "cp1252"}))
    assert read[0]["review"] == "café"


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(ValueError, match="is not an encoding"):
        DataSpec(source="csv", files=("a.csv",), encoding="utf9")
