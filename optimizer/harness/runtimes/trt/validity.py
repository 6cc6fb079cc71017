"""Ask TensorRT-RTX whether it would open an engine here, from the first bytes of the file alone.

Runtime.get_engine_validity reads the header and looks at the driver and the GPU; nothing is
deserialized. Other products have no such question; fit.py's answer stands for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import MachineError, UnopenedError
from ...process.collection import no_collection
from .build.watch import logger

REASONS = {
    1: "it was built by another version",
    2: "this GPU's compute capability is not one it was built for",
    4: "the driver is too old",
    8: "the runtime is too old",
    16: "there is too little memory",
    32: "the file is no engine",
    64: "CUDA does not work here",
}
"""EngineInvalidityDiagnostics, by bit."""
REBUILT = 1 | 2 | 32  # what an engine that is built here has not


@no_collection()
def refuse_invalid(engine: Path | bytes, trt: Any, where: str = "") -> None:
    """Raise MachineError when the runtime says that the engine is not for this machine;
    UnopenedError when an engine that is built here would be.

    engine: the file, or its first bytes at least. trt: the product's module; one that has not
    this question is not asked.
    """
    if not hasattr(trt.Runtime, "get_engine_validity"):
        return
    runtime = trt.Runtime(logger(trt))  # trt.Logger writes to stdout, where answers go
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
        f"the runtime does not open the engine here: {'; '.join(reasons) or f'code {int(bits)}'}",
        where=where or (str(engine) if isinstance(engine, Path) else ""),
        fix="Use the onnxruntime target of the bundle.",
    )
