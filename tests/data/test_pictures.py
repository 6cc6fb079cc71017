"""Images in data sets: folders, paths and bytes are the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.data.datasets import digest_rows, encode_batches, read_samples
from optimizer.data.input_sense import image as image_sense
from optimizer.data.same_rows import check_disjoint
from optimizer.foundation.errors import DataError
from optimizer.harness.contract import Contract
from optimizer.recipe.schema import DataSpec
from tests.harness import small_model
from tests.vision import encoded, picture

CONTRACT = Contract.from_json(small_model.contract("image-classification"))
COLUMNS = {"image": "image", "label": "label"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """photos/<class>/<n>.png, six images of two classes, and the same ones in other forms."""
    import pyarrow as pa
    from pyarrow import parquet

    rows: list[dict[str, Any]] = []
    for i, name in enumerate(["cat", "dog"] * 3):
        file = tmp_path / "photos" / name / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(20 + i, 30, seed=i)))
        rows.append({"image": str(file.relative_to(tmp_path)), "label": name})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    content = [(tmp_path / r["image"]).read_bytes() for r in rows]
    table = pa.table({"image": content, "label": [r["label"] for r in rows]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    return tmp_path


def spec(folder: Path, **fields: Any) -> DataSpec:
    given = {"columns": COLUMNS, "labels": ("cat", "dog"), **fields}
    return DataSpec(**given).model_copy(update={"base": str(folder)})


def of(form: str, folder: Path) -> DataSpec:
    if form == "folder":
        return spec(folder, source="photos", labels=())
    source = "json" if form == "rows.jsonl" else "parquet"
    return spec(folder, source=source, files=(form,))


@pytest.mark.parametrize("form", ["folder", "rows.jsonl", "rows.parquet"])
def test_every_form_gives_the_files_and_their_labels(folder: Path, form: str) -> None:
    rows = read_samples(of(form, folder))
    known = {r.image.sha256: r.label for r in read_samples(of("rows.jsonl", folder)) if r.image}
    assert len(known) == 6
    assert {r.image.sha256: r.label for r in rows if r.image} == known
    (batch,) = encode_batches(rows, CONTRACT, None, 8, 128)
    assert batch["pixel_values"].shape == (6, 3, 32, 24)
    assert image_sense.measure(rows, CONTRACT, None).rows == 6


def test_the_digest_is_of_the_files_and_changes_with_one(folder: Path) -> None:
    before = digest_rows(of("rows.jsonl", folder))
    assert before == digest_rows(of("rows.parquet", folder))
    (folder / "photos/cat/0.png").write_bytes(encoded(picture(9, 9, seed=99)))
    rows = folder / "rows.jsonl"
    rows.write_text(rows.read_text() + "\n")  # rows are cached by the file's state
    assert digest_rows(of("rows.jsonl", folder)) != before


def test_one_file_twice_is_one_row_and_is_not_in_two_sets(folder: Path) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text(rows.read_text() * 2)
    once = read_samples(of("rows.jsonl", folder))
    assert len(once) == 6
    with pytest.raises(DataError, match=r"0\.png.* is also in the one data"):
        check_disjoint({"one": once[:3], "two": once[:1]})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"image": "photos/none.png", "label": "cat"}, "does not exist"),
        ({"image": 7, "label": "cat"}, "is not an image"),
        ({"image": "photos", "label": "cat"}, "does not exist"),
    ],
)
def test_a_row_without_an_image_is_named(folder: Path, line: dict[str, Any], why: str) -> None:
    (folder / "rows.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError, match=f"row 0.*{why}"):
        read_samples(of("rows.jsonl", folder))


def test_an_image_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "photos/dog/1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"image .*1\.png.*its format is not supported"):
        image_sense.measure(read_samples(of("rows.jsonl", folder)), CONTRACT, None)


def test_images_that_become_one_are_refused(folder: Path) -> None:
    for i, file in enumerate(sorted(folder.glob("photos/*/*.png"))):
        file.write_bytes(encoded(picture(8, 8).resize((1, 1)).resize((40 + i, 40))))
    measured = image_sense.measure(read_samples(of("rows.jsonl", folder)), CONTRACT, None)
    assert (measured.images, measured.rows, measured.flat) == (6, 1, 6)
    with pytest.raises(DataError, match="6 different images become 1"):
        image_sense.check(measured, "calibrate")
    assert "have one colour" in image_sense.write_warnings(measured, "calibrate")[0]


def test_text_and_image_together_are_refused(folder: Path) -> None:
    both = spec(folder, source="json", files=("rows.jsonl",), columns={**COLUMNS, "text": "label"})
    with pytest.raises(DataError, match="both text and image"):
        read_samples(both)
