"""Whether OpenVINO's integer kernels are wrong on this processor, measured.

Without VNNI oneDNN adds two products of int8 in 16 bits (harness/fit_columns.py, processor). Then
the ledger refuses what is right elsewhere, and a test of a clean run expects that, exactly there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from optimizer.harness.runtimes.openvino.run import OpenVinoRunner
from tests.harness.runtimes.extreme_products import EXACT, X, write


@cache
def saturate() -> bool:
    """Whether sums are not the exact ones in the kernel that multiplies uint8 by int8."""
    with TemporaryDirectory() as folder:
        model = write("static", Path(folder) / "m.onnx")
        with OpenVinoRunner(model, threads=1) as runner:
            (product,) = (k for k in runner.kernels() if k.kind == "FullyConnected")
            assert product.inputs[:2] == ("u8", "i8")
            return not np.array_equal(runner.infer({"x": X})["y"], EXACT)


def refused(*hops: str) -> list[str]:
    """Which hops of the ledger do not hold of a clean run that multiplies integers: `hops` where
    sums saturate, none elsewhere."""
    return [*hops] if saturate() else []
