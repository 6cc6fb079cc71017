"""Measure the memory of equal programs once per run of tests: most are processes that import torch.

The programs that the timing of a run measures differ by the place of their model alone. The key is
the program with the names of a model's files in place of their place, and with their sizes where
these are more than a tenth of the memory that Python takes with our libraries.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from optimizer.harness.bundle import bench
from tests.made_once import locked

SMALL = 10_000_000  # bytes
PLACE = re.compile(r"(?<=['\"])/[^'\"\\]+")


def key(code: str) -> str:
    return hashlib.sha256(
        PLACE.sub(lambda place: _content(Path(place[0])), code).encode()
    ).hexdigest()


def _content(place: Path) -> str:
    """Names, and sizes where they matter, of the files of a folder, or of an ONNX file and its
    weights."""
    files = place.rglob("*") if place.is_dir() else place.parent.glob(f"{place.name}*")
    sizes = {f.relative_to(place.parent).parts[1:]: f.stat().st_size for f in files if f.is_file()}
    return repr(sorted(sizes.items() if sum(sizes.values()) > SMALL else sizes))


def measure_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep measured bytes in a folder, which every worker reads."""
    folder.mkdir(exist_ok=True)
    measure = bench.read_peak

    def peak_memory(code: str) -> int:
        file = folder / key(code)
        with locked(file):
            if not file.exists():
                part = file.with_suffix(f".{os.getpid()}")
                part.write_text(str(measure(code)))
                part.replace(file)
        return int(file.read_text())

    patch.setattr(bench, "read_peak", peak_memory)
