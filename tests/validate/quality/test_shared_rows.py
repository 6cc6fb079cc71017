"""Rows that are fitted to and judged on are counted, whatever the check of overlaps finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from optimizer.data.datasets import Sample
from optimizer.data.pictures import Picture
from optimizer.foundation.errors import DataError
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.text import TextTokenizer, load_tokenizer
from optimizer.validate import data as validate_data
from optimizer.validate import stage
from optimizer.validate.quality import shared_rows
from tests.harness import small_model
from tests.validate.runs import Run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Contract, TextTokenizer]:
    file = small_model.tokenizer(tmp_path_factory.mktemp("tokenizer"))
    contract = Contract.from_json(small_model.contract())
    return contract, load_tokenizer(file.parent, contract)


def counted(model: tuple[Contract, object], **rows: list[Sample]) -> dict[str, dict[str, int]]:
    places = {"evaluate": "validate.data", "also": "validate.also.x.data"}
    return shared_rows.count({places.get(n, n): r for n, r in rows.items()}, *model)


def test_sets_without_a_common_row_count_0(model: tuple[Contract, TextTokenizer]) -> None:
    found = counted(
        model, calibrate=[Sample("good")], evaluate=[Sample("bad")], also=[Sample("film")]
    )
    assert found == {"calibrate": {"validate.data": 0, "validate.also.x.data": 0}}


@pytest.mark.parametrize("name", ["evaluate", "also"])
def test_a_common_row_is_named_with_how_many_there_are(
    name: str, model: tuple[Contract, TextTokenizer]
) -> None:
    judged = {"evaluate": [Sample("bad")], name: [Sample("bad film"), Sample("good")]}
    with pytest.raises(
        DataError, match="1 of 2 rows give the model the same input as rows of calibrate"
    ):
        counted(model, calibrate=[Sample("good"), Sample("film")], **judged)


def test_a_row_on_either_side_of_a_pair_counts(model: tuple[Contract, TextTokenizer]) -> None:
    with pytest.raises(
        DataError, match="1 of 1 rows give the model the same input as rows of calibrate"
    ):
        counted(model, calibrate=[Sample("good")], evaluate=[Sample("bad", text_pair="good")])


def test_images_are_known_by_their_files() -> None:
    contract = Contract.from_json(small_model.contract("image-classification"))
    one, other = (Sample(image=Picture(n, "", n.encode())) for n in ("a", "b"))
    assert counted((contract, None), calibrate=[one], evaluate=[other])
    with pytest.raises(DataError, match="1 of 1 rows"):
        counted((contract, None), calibrate=[one], evaluate=[one])


def early(run: Run, out: Path) -> None:
    del out
    stage.check_inputs(run.section, run.folder("source"))


def late(run: Run, out: Path) -> None:
    stage.STAGE.run(run.section, run.artifacts, out=out)


@pytest.mark.parametrize("judge", [early, late])
def test_a_check_of_overlaps_that_is_off_hides_nothing(
    judge: Callable[[Run, Path], None],
    classifier_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = classifier_run.section
    assert section.calibrate is not None
    data = section.validate_.data.model_copy(update={"columns": {"text": "text"}})
    calibrate = section.calibrate.model_copy(update={"data": data})
    run = Run(classifier_run.root, section.model_copy(update={"calibrate": calibrate}))
    with pytest.raises(DataError, match="is also in the"):
        judge(run, tmp_path)
    monkeypatch.setattr(validate_data, "check_disjoint", lambda *_, **__: None)
    with pytest.raises(
        DataError,
        match=r"validate.data: \d+ of 64 rows give the model the same input as rows of calibrate",
    ):
        judge(run, tmp_path)
