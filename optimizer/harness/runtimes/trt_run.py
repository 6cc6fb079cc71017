"""Run a TensorRT engine of any product on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..contract import Contract
from ..errors import MachineError
from ..tasks.batch import Array
from .trt_decoder import TrtDecoder


class TrtRunner:
    """An engine opened for inference; see OrtRunner, whose interface this is.

    engine: a file that fit.py found to fit this machine; a wrong one is never given here.
    product: a row of trt_products.PRODUCTS. graphs: replay a captured CUDA graph for shapes seen
    before. runtime_cache: where RTX keeps the kernels it compiles, read if there and written at
    close; other products have none.
    Raises BundleError when the file is no engine, MachineError when the package, cuda-python or
    the GPU is missing.
    """

    device = "cuda"
    threads = 0

    def __init__(
        self,
        engine: Path,
        *,
        product: str = "tensorrt-rtx",
        graphs: bool = True,
        runtime_cache: Path | None = None,
    ) -> None:
        self.engine, self.product, self.graphs = Path(engine), product, graphs
        self.runtime_cache = runtime_cache
        raise MachineError("engines are not run yet", where=str(engine))

    @property
    def inputs(self) -> dict[str, np.dtype[Any] | None]:
        """Name and element type of each input."""
        raise NotImplementedError

    @property
    def outputs(self) -> list[str]:
        """Names, in the engine's order."""
        raise NotImplementedError

    @property
    def metadata(self) -> dict[str, str]:
        """An engine says nothing of itself: {}."""
        return {}

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run once. Raises InputError naming the input that is missing, extra, mis-shaped or
        outside every profile, and the range it left."""
        raise NotImplementedError

    def resident(self, arrays: Mapping[str, Array]) -> Any:
        """The inputs copied to the device, for a benchmark: .run() is one forward with nothing
        copied, waited for; .outputs() what it gave."""
        raise NotImplementedError

    def decoder(self, contract: Contract, capacity: int = 0) -> TrtDecoder:
        """A new batch of sequences to continue; see decoder.DecoderRunner."""
        raise NotImplementedError

    def layer_information(self) -> str:
        """The engine's layers as the inspector writes them (JSON)."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the device's memory; writes the runtime cache."""

    def __enter__(self) -> TrtRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
