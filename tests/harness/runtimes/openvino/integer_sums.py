"""Measure if OpenVINO's integer kernels are inexact on this processor.

Without VNNI oneDNN adds two products of int8 in 16 bits (harness/bundle/fit_columns.py, processor).
Then the ledger refuses what is right elsewhere, and a test of a clean run expects that, exactly
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from optimizer.harness.runtimes.openvino.run import OpenVinoRunner
from optimizer.validate.ledger.entry import LedgerEntry
from tests.harness.runtimes.extreme_products import EXACT, X, write

OFF = "times as far off as rounding allows"


@cache
def saturate() -> bool:
    """Return True if the kernel that multiplies uint8 by int8 has inexact sums."""
    with TemporaryDirectory() as folder:
        model = write("static", Path(folder) / "m.onnx")
        with OpenVinoRunner(model, threads=1) as runner:
            (product,) = (k for k in runner.kernels() if k.kind == "FullyConnected")
            assert product.inputs[:2] == ("u8", "i8")
            return not np.array_equal(runner.infer({"x": X})["y"], EXACT)


def misjudged(
    entries: Iterable[LedgerEntry], integers: bool = True
) -> list[tuple[str, Sequence[str]]]:
    """Return the wrong verdicts of the ledger on a clean run, by hop.

    Every hop holds, except the engine's of a run with `integers` where sums saturate, which is
    refused.
    """
    broken = [(e.hop, e.problems) for e in entries if e.ok is not True]
    if not integers or not saturate():
        return broken
    rightly = [b for b in broken if b[0] == "engine" and any(OFF in words for words in b[1])]
    return [b for b in broken if b not in rightly] if rightly else [*broken, ("engine", ("held",))]
