"""The data that ships is what it says: its bytes, its rows, its attribution, and no overlap."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from optimizer.data.datasets import read_samples
from optimizer.data.same_rows import check_disjoint
from optimizer.recipe.schema import DataSpec

FOLDER = Path(__file__).parents[2] / "calibration"
NAMES = ("calibrate", "train", "evaluate", "time")


def spec(name: str) -> DataSpec:
    fields = yaml.safe_load((FOLDER / f"sentiment-{name}.yaml").read_text())
    return DataSpec.model_validate_json(json.dumps({**fields, "base": str(FOLDER)}))


@pytest.fixture(scope="module")
def make() -> ModuleType:
    """The script that makes the files."""
    file = FOLDER / "make_sentiment.py"
    loader = importlib.util.spec_from_file_location("make_sentiment", file)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


def test_the_files_match_their_recorded_digests() -> None:
    lines = (FOLDER / "sentiment.sha256").read_text().splitlines()
    assert len(lines) == len(NAMES)
    for line in lines:
        expected, name = line.split()
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == expected


def test_the_sets_are_disjoint() -> None:
    check_disjoint({name: read_samples(spec(name)) for name in NAMES})


def test_no_sentence_of_a_timing_text_is_in_another_set() -> None:
    timing = " ".join(s.text for s in read_samples(spec("time")))
    for name in ("calibrate", "train", "evaluate"):
        # short ones ("Great product") may be part of another sentence
        long = [s.text for s in read_samples(spec(name)) if len(s.text) > 30]
        assert not [t for t in long if t in timing]


def test_there_is_enough_of_each() -> None:
    sizes = {name: len(read_samples(spec(name))) for name in NAMES}
    assert sizes["calibrate"] >= 512
    assert sizes["train"] >= 1100
    assert sizes["evaluate"] >= 1150
    assert sizes["time"] >= 64


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_both_labels_are_well_represented(name: str) -> None:
    labels = [s.label for s in read_samples(spec(name))]
    assert set(labels) == {0, 1}
    assert 0.4 < sum(labels) / len(labels) < 0.6  # type: ignore[arg-type]


def test_every_timing_text_fills_128_tokens(minilm_source: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(minilm_source / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert min(len(tokenizer.encode(s.text).ids) for s in read_samples(spec("time"))) >= 128


@pytest.mark.parametrize("name", NAMES)
def test_every_spec_names_the_licence_and_the_authors(name: str) -> None:
    assert spec(name).licence == "CC-BY-4.0"
    assert "Kotzias" in spec(name).attribution
    assert "KDD 2015" in spec(name).attribution


def test_the_script_splits_without_a_sentence_in_two_sets(make: ModuleType) -> None:
    rows = [{"text": f"sentence number {i}", "label": i % 2} for i in range(2500)]
    parts = make.split(rows)
    assert len(parts["calibrate"]) == make.CALIBRATE
    assert len(parts["train"]) == make.TRAIN
    used = [r["text"] for n in ("calibrate", "train", "evaluate") for r in parts[n]]
    assert len(used) == len(set(used)) == len(rows) - make.TIME_ROWS
    assert len({r["text"] for r in parts["time"]}) == make.TIME_TEXTS


def test_the_script_refuses_other_fixtures(make: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "imdb.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"imdb\.json has sha256"):
        make.rows(tmp_path)


def test_mangled_punctuation_is_repaired(make: ModuleType) -> None:
    assert make.repaired("a \x96 b\x85 Québec") == "a – b… Québec"
