"""The script that makes Fashion-MNIST's parquet files reads idx files, and no others."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "calibration"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    loader = importlib.util.spec_from_file_location("make_fashion", FOLDER / "make_fashion.py")
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


def written(folder: Path, values: np.ndarray, kind: int = 0x08) -> Path:
    axes = b"".join(n.to_bytes(4, "big") for n in values.shape)
    header = bytes([0, 0, kind, values.ndim]) + axes
    file = folder / "file.gz"
    file.write_bytes(gzip.compress(header + values.tobytes()))
    return file


def test_an_idx_file_is_read_as_it_was_written(make: ModuleType, tmp_path: Path) -> None:
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(make.idx(written(tmp_path, images), make.IMAGES), images)
    labels = np.array([3, 1, 2], np.uint8)
    np.testing.assert_array_equal(make.idx(written(tmp_path, labels), make.LABELS), labels)


def test_a_file_of_another_kind_is_refused(make: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not an idx file"):
        make.idx(written(tmp_path, np.zeros(3, np.uint8), kind=0x0D), make.LABELS)


def test_no_image_has_two_purposes(make: ModuleType) -> None:
    rows = [range(60_000)[part] for name, part in make.SPLITS.values() if name == "train"]
    assert sum(map(len, rows)) == len(set().union(*rows)) == 60_000
