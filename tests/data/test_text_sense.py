"""Checks that a tokenizer distinguishes texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.data.datasets import Sample
from optimizer.data.input_sense import text as text_sense
from optimizer.data.input_sense.text import TextSense
from optimizer.foundation.errors import DataError
from optimizer.harness.contract import read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.load.stage import STAGE
from optimizer.recipe.schema import Model
from tests.conftest import sentences

Measure = Callable[..., TextSense]


@pytest.fixture(scope="module")
def measure(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Counts of texts with the tiny encoder's tokenizer, which has 64 tokens."""
    out = tmp_path_factory.mktemp("loaded")
    STAGE.run(Model(source=str(tiny_bert), task="sentence-embedding"), out=out)
    contract = read(out / "contract.json")
    tokenizer = load_tokenizer(out / "checkpoint", contract)

    def of(texts: list[str], length: int | None = None) -> TextSense:
        return text_sense.measure([Sample(t) for t in texts], contract, tokenizer, length)

    return of


def test_texts_of_the_models_language_are_told_apart(measure: Measure) -> None:
    found = measure(sentences(50))
    assert (found.texts, found.rows, found.shared, found.unknown) == (50, 50, 0, 0)
    text_sense.check(found, "validate.data")
    assert text_sense.write_warnings(found, "validate.data") == []


def test_texts_of_unknown_tokens_are_refused_when_they_are_most(measure: Measure) -> None:
    some = [*sentences(30), *("猫" * n for n in range(1, 30))]
    text_sense.check(measure(some), "x")
    with pytest.raises(DataError, match=r"31 of 61 texts have no token .* knows"):
        text_sense.check(measure([*some, "犬", "犬 犬"]), "validate.data")


def test_texts_that_become_one_row_are_refused(measure: Measure) -> None:
    alike = ["good day", "Good day", "GOOD day"]
    with pytest.raises(DataError, match="3 different texts become 1 different rows"):
        text_sense.check(measure(alike), "validate.data")
    text_sense.check(measure(["good day", "bad day"]), "calibrate")


def test_texts_that_begin_alike_are_refused_where_they_are_cut_there(measure: Measure) -> None:
    texts = [" ".join(["the"] * 80 + [t]) for t in sentences(20)] + sentences(10, seed=3)
    with pytest.raises(
        DataError, match=r"20 of 30 .* cannot distinguish them .* longer max_length"
    ):
        text_sense.check(measure(texts), "validate.data")


def test_cutting_most_texts_is_reported_and_not_refused(measure: Measure) -> None:
    found = measure(sentences(40), 5)
    assert found.cut > 20
    text_sense.check(replace(found, shared=0), "calibrate")
    (said,) = text_sense.write_warnings(found, "calibrate")
    assert said.startswith(f"calibrate data: {found.cut} of 40 texts are longer")


def test_the_digest_is_of_the_token_ids_and_not_of_the_texts(measure: Measure) -> None:
    assert measure(["a good day"]).sha256 == measure(["A GOOD day"]).sha256
    assert measure(["a good day"]).sha256 != measure(["a bad day"]).sha256
