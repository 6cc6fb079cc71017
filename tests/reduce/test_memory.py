"""Peak memory of reduce does not grow with depth; measured in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compress_memory.py"


@pytest.mark.slow
@pytest.mark.parametrize("importance", ["fisher", "second_order"])
def test_eight_times_the_layers_need_no_more_memory(importance: str) -> None:
    layers = ["--width", "256", "--layers", "6", "48", "--reduce", importance]
    command = [sys.executable, str(SCRIPT), *layers]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    shallow, deep = (json.loads(out)[n] for n in ("6", "48"))
    added = deep["weights_mb"] - shallow["weights_mb"]
    assert added > 0.15 * shallow["peak_mb"]  # holding the weights would break the next line
    assert deep["peak_mb"] <= 1.15 * shallow["peak_mb"]
