"""Bundle that another project's server serves, in an environment of that project.

    PYTHONPATH=BUNDLE PYTHON benchmarks/serving/peers/litserve_.py BUNDLE PORT ROWS THREADS
    (or mlserver_.py, bentoml_.py, ray_.py)

The harness in the bundle opens and runs the model, so that file, session, tokenizer and arithmetic
are ours. Everything before and after it follows the other project's documentation, with its own
batches. A request holds one text; its answer is the embedding as base64 of float32.

ROWS: maximum texts per batch; 1 for no batches
THREADS: threads of the session
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import numpy as np
from harness.bundle.bundle import Bundle

NAMES = ("BUNDLE", "PORT", "ROWS", "THREADS")
BUNDLE, PORT, ROWS, THREADS = (f"SERVING_PEER_{name}" for name in NAMES)


def read_arguments() -> None:
    """Copy the command line into the environment, which a server's own processes inherit."""
    os.environ.update(zip((BUNDLE, PORT, ROWS, THREADS), sys.argv[1:], strict=True))


def port() -> int:
    return int(os.environ[PORT])


def rows() -> int:
    """Read the maximum number of texts per batch."""
    return int(os.environ[ROWS])


class Embedder:
    """Open bundle: texts -> embeddings."""

    def __init__(self) -> None:
        self._bundle = Bundle(Path(os.environ[BUNDLE]), threads=int(os.environ[THREADS]))

    def __call__(self, texts: list[str]) -> list[str]:
        answers = self._bundle.predict(texts, batch_size=rows())
        vectors = (np.asarray(answer["embedding"], "<f4") for answer in answers)
        return [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
