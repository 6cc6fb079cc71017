"""Run a lowered model in a format that transformers reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from optimizer.foundation.errors import LedgerError, OptimizeError
from optimizer.validate.decoder import TorchDecoder
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.distance import Array
from optimizer.validate.materials import Materials


@contextmanager
def translate_errors(reader: str, target: str) -> Iterator[None]:
    """Convert any exception of a reader to a LedgerError: a model that it does not read is
    faulty."""
    try:
        yield
    except OptimizeError:
        raise
    except Exception as e:  # of any kind: torch, safetensors and others read the model
        raise LedgerError(
            f"{reader} does not run it ({type(e).__name__}: {' '.join(str(e).split())[:200]})",
            where=target,
        ) from e


class Runner:
    """A model in transformers with the interface of a graph, in which a decoder's KV cache is an
    input. file: file or folder that it was loaded from."""

    def __init__(self, model: nn.Module, file: Path, m: Materials) -> None:
        self._model, self.model = model, file
        self._outputs, self._contract = m.outputs, m.contract
        self._past, self._present = m.cache_names
        self.inputs = dict.fromkeys(self._past, np.float32)

    def infer(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """{output: array} of the model; for a decoder logits, and the cache with these tokens."""
        if not self._past:
            return trace.run(self._model, arrays, self._outputs)
        past = {name: np.asarray(arrays[name]) for name in self._past}
        system = TorchDecoder(self._model, self._contract)
        cache = past if past[self._past[0]].shape[2] else None
        logits, filled = system.step(arrays["input_ids"], arrays["attention_mask"], cache)
        pairs = zip(self._present, self._past, strict=True)
        return {"logits": logits, **{present: filled[name] for present, name in pairs}}

    def close(self) -> None:
        """Nothing is held outside the process."""
