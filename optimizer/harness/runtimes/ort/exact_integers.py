"""Make products of uint8 and int8 exact on every processor.

On x86-64 with AVX2 and without VNNI (Intel before Cascade Lake, AMD before Zen 4) ONNX Runtime adds
pairs of such products in saturating 16-bit integers: INT8 answers are silently wrong. The session
entry EXACT moves weights to uint8, whose products are exact
(onnxruntime_session_options_config_keys.h; it needs extended graph optimizations). On other
processors it would only slow a forward pass down by half (MiniLM on a Zen 4), so a model of one
product tests the kernels first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

EXACT = ("session.x64quantprecision", "1")
FOLDING = "ConstantFolding"
"""Optimizer that a session with EXACT is opened without where it fails with it. Where two products
read one int8 tensor that depends on no input (DeBERTa's relative positions in the dialect of
TensorRT), ONNX Runtime 1.31 folds it and gives its two uint8 copies one name: "Attempt to replace
the existing tensor"."""
WIDTH, COLUMNS = 64, 16  # of the product: wide enough for the kernels of large products
ROWS = (1, 16)  # one row has its own kernel
HIGHEST, LARGEST = 255, 127  # maximum of uint8 and of our int8
PRODUCT = bytes.fromhex(
    "08083a6a0a180a01610a0162120179220d4d61744d756c496e7465676572120770726f647563745a170a0161"
    "12120a100802120c0a061204726f77730a0208405a130a0162120e0a0c080312080a0208400a02081062170a"
    "017912120a100806120c0a061204726f77730a02081042040a00100d"
)
"""The ONNX file of MatMulInteger(a uint8 [rows, 64], b int8 [64, 16]) -> y int32, opset 13."""


def list_settings(ort: Any) -> tuple[tuple[str, str], ...]:
    """Return the entries (key, value) of an ONNX Runtime session that make integer products exact.

    ort: the onnxruntime module

    Returns () where products are exact already, which a test run of about a millisecond measures.
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
