"""Generation with onnxruntime-genai: its session and KV cache, our sampling.

A model folder of a bundle holds genai_config.json beside the ONNX file. Only single rows run,
because onnxruntime-genai pads on the right. Its logits equal those of the harness's own loop, the
reference, up to float rounding.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import Contract
from ...errors import BundleError, InputError, MachineError
from ...inputs.batch import Array
from ..decoder import LastOfStep, check_step
from .privacy import disable_telemetry

CONFIG = "genai_config.json"


class GenaiRunner:
    """A model folder opened by onnxruntime-genai; see decoder.DecoderRunner.

    Raises MachineError if the package is missing, BundleError if it cannot open the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._genai = _import()
        if not (folder / CONFIG).is_file():
            raise BundleError(f"{CONFIG} is missing", where=str(folder), fix="Leave --genai out.")
        try:
            self._model = self._genai.Model(os.fspath(folder))
        except Exception as e:  # the binding raises RuntimeError and its own
            raise BundleError(
                f"onnxruntime-genai {self._genai.__version__} cannot open it ({e})",
                where=str(folder),
                fix="Leave --genai out.",
            ) from e

    def decoder(self, contract: Contract, capacity: int = 0) -> GenaiDecoder:
        """Return onnxruntime-genai's decoder of one row with an empty KV cache.

        capacity: maximum tokens; 0 means the whole context.
        """
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(max_length=capacity or contract.decoder.context)
        return GenaiDecoder(self._genai.Generator(self._model, parameters))

    def close(self) -> None:
        self._model = None


class GenaiDecoder(LastOfStep):
    """Decoder of one row in onnxruntime-genai; see decoder.Decoder."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.past = 0

    def step(self, arrays: Mapping[str, Array]) -> Array:
        """Run onnxruntime-genai on new tokens; return logits (1, 1, vocabulary) of the last new
        token only.

        Raises InputError for several rows or padding.
        """
        rows, sequence = check_step(arrays, [*arrays], self.past, 1)
        if rows != 1 or not np.all(arrays["attention_mask"]):
            raise InputError(
                f"{rows} rows or padding was given",
                where="onnxruntime-genai",
                accepted="one row without padding",
            )
        self._generator.append_tokens(arrays["input_ids"].astype(np.int32))
        self.past += sequence
        logits = np.asarray(self._generator.get_logits(), np.float32)
        return logits.reshape(1, -1, logits.shape[-1])[:, -1:]


def _import() -> Any:
    disable_telemetry()
    try:
        import onnxruntime_genai
    except ImportError as e:
        raise MachineError(
            f"onnxruntime-genai cannot be imported ({e})", fix="pip install onnxruntime-genai"
        ) from None
    onnxruntime_genai.disable_telemetry_events()
    return onnxruntime_genai
