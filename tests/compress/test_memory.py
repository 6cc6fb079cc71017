"""Peak memory does not grow with depth. Measured in fresh processes; the numbers are bytes held,
not times, so a busy machine does not change them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "encoders" / "compress_memory.py"


def test_eight_times_the_layers_need_no_more_memory() -> None:
    out = subprocess.run(
        [sys.executable, str(SCRIPT), "--width", "256", "--layers", "4", "32"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    shallow, deep = (json.loads(out)[n] for n in ("4", "32"))
    added = deep["weights_mb"] - shallow["weights_mb"]
    assert deep["peak_mb"] - shallow["peak_mb"] < added / 2  # holding the weights adds all
