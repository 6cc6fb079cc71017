"""Crops of photographs are parts of them, reproducible, and no file of a wheel is taken unseen."""

from __future__ import annotations

import importlib
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

FOLDER = Path(__file__).parents[2] / "calibration"


@pytest.fixture(scope="module")
def make() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("make_photographs")
    sys.path.remove(str(FOLDER))


def photograph() -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    return Image.fromarray(values).resize((600, 450))


def test_a_crop_is_the_same_for_the_same_seed_and_another_for_the_next(make: ModuleType) -> None:
    first, again, rng = (np.random.default_rng(7) for _ in range(3))
    same = [make.jpeg(make.crop(photograph(), r)) for r in (first, again)]
    assert same[0] == same[1]
    assert make.jpeg(make.crop(photograph(), rng)) != make.jpeg(make.crop(photograph(), rng))


def test_the_shorter_side_of_a_crop_is_what_the_processor_resizes_to(make: ModuleType) -> None:
    rng = np.random.default_rng(1)
    sizes = [make.crop(photograph(), rng).size for _ in range(20)]
    assert {min(size) for size in sizes} == {make.SHORTER}


def test_a_file_of_a_wheel_that_is_another_is_refused(make: ModuleType) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("photograph.png", b"other bytes")
    wheel = zipfile.ZipFile(stream)
    assert make.wheels.read(wheel, "photograph.png", "") == b"other bytes"
    with pytest.raises(SystemExit, match=r"photograph\.png"):
        make.wheels.read(wheel, "photograph.png", "0123456789abcdef")
