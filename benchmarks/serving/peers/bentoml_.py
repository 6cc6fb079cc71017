"""https://docs.bentoml.com : adaptive batching. `bentoml serve` imports this file again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import bentoml
from embedder import ROWS, Embedder, port, read_arguments, rows


class Model:
    def __init__(self) -> None:
        self.embedder = Embedder()

    @bentoml.api(batchable=int(os.environ.get(ROWS, "1")) > 1, max_batch_size=8)
    def embed(self, texts: list[str]) -> list[str]:
        return self.embedder(texts)


if __name__ == "__main__":
    read_arguments()
    if rows() not in (1, 8):
        raise SystemExit("batches of 8 are written above")
    os.chdir(Path(__file__).parent)
    command = [sys.executable, "-m", "bentoml", "serve", f"{Path(__file__).stem}:Service"]
    os.execv(sys.executable, [*command, "--host", "127.0.0.1", "--port", str(port())])
else:
    Service = bentoml.service(Model, workers=1)
