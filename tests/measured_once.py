"""Measure the memory of equal programs once per run of tests: most are processes that import torch.

The programs that the timing of a run measures differ by their model. Of one whose files are less
than a tenth of the memory that Python takes with our libraries, neither its place matters nor
anything else: the key is what the program imports, its runtime and the names of its inputs. Another
key is the whole program with the names of a model's files in place of their place, and with their
sizes where these are more than that.
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
RUNTIME = re.compile(r'"(?:runtime|device)": "\w+"')
INPUT = re.compile(r"'\w+': \(\(")  # its name, before its shape


def key(code: str) -> str:
    sizes = [_sizes(Path(place)) for place in PLACE.findall(code)]
    small = all(sum(each.values()) <= SMALL for each in sizes)
    if small and ("load_torch_model" in code or RUNTIME.search(code)):
        imports = [line for line in code.splitlines() if line.startswith(("import", "from"))]
        code = "\n".join([*imports, *RUNTIME.findall(code), *INPUT.findall(code)])
    else:
        code = PLACE.sub(lambda place: _content(_sizes(Path(place[0]))), code)
    return hashlib.sha256(code.encode()).hexdigest()


def _sizes(place: Path) -> dict[tuple[str, ...], int]:
    """{name: bytes} of the files of a folder, or of an ONNX file and its weights."""
    files = place.rglob("*") if place.is_dir() else place.parent.glob(f"{place.name}*")
    return {f.relative_to(place.parent).parts[1:]: f.stat().st_size for f in files if f.is_file()}


def _content(sizes: dict[tuple[str, ...], int]) -> str:
    """Names, and sizes where they matter."""
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
