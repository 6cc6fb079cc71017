"""The prose that ships: its bytes, and no document in two sets."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import yaml

from optimizer.data.datasets import read_samples
from optimizer.data.same_rows import check_disjoint
from optimizer.recipe.schema import DataSpec

FOLDER = Path(__file__).parents[2] / "calibration"
NAMES = ("calibrate", "evaluate", "time", "sentences")


def spec(name: str) -> DataSpec:
    fields = yaml.safe_load((FOLDER / f"jargon-{name}.yaml").read_text())
    return DataSpec.model_validate_json(json.dumps({**fields, "base": str(FOLDER)}))


def test_the_files_match_their_recorded_digests() -> None:
    lines = (FOLDER / "jargon.sha256").read_text().splitlines()
    assert len(lines) == len(NAMES)
    for line in lines:
        expected, name = line.split()
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == expected


def test_no_paragraph_is_in_two_sets() -> None:
    sets = {name: read_samples(spec(name)) for name in NAMES}
    check_disjoint(sets)
    parts = {n: {p for s in rows for p in s.text.split("\n\n")} for n, rows in sets.items()}
    assert not parts["calibrate"] & (parts["evaluate"] | parts["time"])
    assert not parts["evaluate"] & parts["time"]
    judging = " ".join(s.text.replace("\n", " ") for n in ("evaluate", "time") for s in sets[n])
    assert not [s for s in parts["sentences"] if s in judging]


def test_every_set_says_whose_it_is() -> None:
    assert all("Jargon File" in spec(name).attribution for name in NAMES)
