"""Products of uint8 and int8 that are exact on every processor.

On x86-64 with AVX2 and without VNNI (Intel before 2019's Cascade Lake, AMD before Zen 4) ONNX
Runtime adds pairs of such products in 16 bits, which saturate: INT8 answers are wrong, and nothing
says so. EXACT makes it move weights to uint8, whose products are exact
(onnxruntime_session_options_config_keys.h; it needs the extended graph optimizations, so nothing
changes in a graph that is run as it is written). Where products are exact already it would do the
same, and make a forward pass slower by half (MiniLM on a Zen 4), so whether it is needed is asked
of the kernels themselves, with a model of one product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

EXACT = ("session.x64quantprecision", "1")
WIDTH, COLUMNS = 64, 16  # of the product: wide enough for the kernels that large ones run in
ROWS = (1, 16)  # one row runs in a kernel of its own
HIGHEST, LARGEST = 255, 127  # of uint8 and of our int8
PRODUCT = bytes.fromhex(
    "08083a6a0a180a01610a0162120179220d4d61744d756c496e7465676572120770726f647563745a170a0161"
    "12120a100802120c0a061204726f77730a0208405a130a0162120e0a0c080312080a0208400a02081062170a"
    "017912120a100806120c0a061204726f77730a02081042040a00100d"
)
"""The ONNX file of MatMulInteger(a uint8 [rows, 64], b int8 [64, 16]) -> y int32, opset 13."""


def settings(ort: Any) -> tuple[tuple[str, str], ...]:
    """Session entries that make integer products exact on this processor: none where they are.

    ort: the module onnxruntime. It takes about a millisecond.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(PRODUCT, options, providers=["CPUExecutionProvider"])
    b = np.full((WIDTH, COLUMNS), LARGEST, np.int8)
    for rows in ROWS:
        a = np.full((rows, WIDTH), HIGHEST, np.uint8)
        (y,) = session.run(None, {"a": a, "b": b})
        if np.any(y != WIDTH * HIGHEST * LARGEST):
            return (EXACT,)
    return ()
