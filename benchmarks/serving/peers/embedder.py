"""A bundle behind another project's server, in an environment of that project.

    PYTHON benchmarks/serving/peers/litserve_.py BUNDLE PORT ROWS THREADS
    (or mlserver_.py, bentoml_.py, ray_.py)

The model is the bundle's, opened and asked by the harness that is in the bundle, so that file,
session, tokenizer and arithmetic are ours; what comes before and after is the other project's, as
its documentation has it, with its own batches of up to ROWS texts (1: none). THREADS: of the
session.
A text comes and its embedding goes as base64 of float32.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import numpy as np

NAMES = ("BUNDLE", "PORT", "ROWS", "THREADS")
BUNDLE, PORT, ROWS, THREADS = (f"SERVING_PEER_{name}" for name in NAMES)


def read_arguments() -> None:
    """The command line into the environment, which a server's own processes inherit."""
    os.environ.update(zip((BUNDLE, PORT, ROWS, THREADS), sys.argv[1:], strict=True))


def port() -> int:
    return int(os.environ[PORT])


def rows() -> int:
    """Of a batch."""
    return int(os.environ[ROWS])


class Embedder:
    """The bundle, open."""

    def __init__(self) -> None:
        sys.path.insert(0, os.environ[BUNDLE])
        from harness.bundle.bundle import Bundle

        self._bundle = Bundle(Path(os.environ[BUNDLE]), threads=int(os.environ[THREADS]))

    def __call__(self, texts: list[str]) -> list[str]:
        answers = self._bundle.predict(texts, batch_size=rows())
        vectors = (np.asarray(answer["embedding"], "<f4") for answer in answers)
        return [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
