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
    """Convert any exception inside to a LedgerError: a model that its own reader refuses is faulty.

    reader: name of the reader, for the message
    target: name of the target, for the message
    """
    try:
        yield
    except OptimizeError:
        raise
    except Exception as e:  # of any kind: torch, safetensors and others read the model
        raise LedgerError(
            f"{reader} does not run it ({type(e).__name__}: {' '.join(str(e).split())[:200]})",
            where=target,
        ) from e


class TransformersRunner:
    """Runner of a transformers model with the inputs and outputs of an ONNX graph: a decoder's KV
    cache is an input and an output.

    file: file or folder that the model was loaded from
    """

    def __init__(self, model: nn.Module, file: Path, m: Materials) -> None:
        self._model, self.model = model, file
        self._outputs, self._contract = m.outputs, m.contract
        self._past, self._present = m.cache_names
        self.inputs = dict.fromkeys(self._past, np.float32)

    def infer(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Return {output name: array}; of a decoder the logits and the KV cache with the new
        tokens.

        arrays: {input name: array}
        """
        if not self._past:
            return trace.run(self._model, arrays, self._outputs)
        past = {name: np.asarray(arrays[name]) for name in self._past}
        system = TorchDecoder(self._model, self._contract)
        cache = past if past[self._past[0]].shape[2] else None
        logits, filled = system.step(arrays["input_ids"], arrays["attention_mask"], cache)
        pairs = zip(self._present, self._past, strict=True)
        return {"logits": logits, **{present: filled[name] for present, name in pairs}}

    def close(self) -> None:
        """Do nothing, because a torch model holds no resources outside of this process; the
        interface of Runner asks for it."""
