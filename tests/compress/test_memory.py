"""Peak memory does not grow with depth. Measured in fresh processes; the numbers are bytes held,
not times, so a busy machine does not change them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.encoders import compress_memory


def compressed(folder: Path, layers: int) -> dict[str, Any]:
    """Figures of compressing an encoder of these layers in a process of its own."""
    folder.mkdir()
    compress_memory.make(folder, 512, layers)
    command = [sys.executable, compress_memory.__file__, "compress", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def test_three_times_the_layers_need_no_more_memory(tmp_path: Path) -> None:
    # 8 layers return freed memory twice, so that both peaks hold what is kept between two returns
    shallow, deep = (compressed(tmp_path / str(n), n) for n in (8, 24))
    added = deep["weights_mb"] - shallow["weights_mb"]
    assert deep["peak_mb"] - shallow["peak_mb"] < added / 2  # holding the weights adds all
