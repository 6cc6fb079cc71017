"""Check with TensorRT-RTX whether an engine fits this machine, from its header alone.

Runtime.get_engine_validity compares the header with the driver and the GPU, without deserializing
the engine. Other products lack this function and rely on bundle/fit.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import MachineError, UnopenedError
from ...process.collection import pause_collection
from .build.watch import logger

REASONS = {
    1: "it was built by another version",
    2: "this GPU's compute capability is not one it was built for",
    4: "the driver is too old",
    8: "the runtime is too old",
    16: "there is too little memory",
    32: "the file is not an engine",
    64: "CUDA does not work on this machine",
}
"""EngineInvalidityDiagnostics, by bit."""
REBUILT = 1 | 2 | 32  # reasons that building on this machine removes


@pause_collection()
def refuse_invalid(engine: Path | bytes, trt: Any) -> None:
    """Raise an error if TensorRT rejects the engine on this machine.

    engine: file, or at least its first bytes
    trt: module of the product

    Raises UnopenedError if building the engine again on this machine would help, else MachineError.
    Accepts every engine of a product without this check.
    """
    if not hasattr(trt.Runtime, "get_engine_validity"):
        return
    runtime = trt.Runtime(logger(trt))  # trt.Logger writes to stdout, which holds answers
    size = runtime.engine_header_size
    if isinstance(engine, Path):
        with engine.open("rb") as f:
            header = f.read(size)
    else:
        header = engine[:size]
    validity, bits = runtime.get_engine_validity(header)
    if validity != trt.EngineValidity.INVALID:
        return
    reasons = [text for bit, text in REASONS.items() if int(bits) & bit]
    kind = MachineError if int(bits) & ~REBUILT else UnopenedError
    raise kind(
        f"the runtime rejects the engine: {'; '.join(reasons) or f'code {int(bits)}'}",
        where=str(engine) if isinstance(engine, Path) else "",
        fix="Use the onnxruntime target of the bundle.",
    )
