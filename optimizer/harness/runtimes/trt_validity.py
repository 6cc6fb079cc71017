"""Ask TensorRT-RTX whether it would open an engine here, from the first bytes of the file alone.

Runtime.get_engine_validity reads the header and looks at the driver and the GPU; nothing is
deserialized. Other products have no such question; fit.py's answer stands for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import MachineError

SAID = {
    1: "it was built by another version",
    2: "this GPU's compute capability is not one it was built for",
    4: "the driver is too old",
    8: "the runtime is too old",
    16: "there is too little memory",
    32: "the file is no engine",
    64: "CUDA does not work here",
}
"""EngineInvalidityDiagnostics, by bit."""


def refuse_invalid(engine: Path, trt: Any) -> None:
    """Raise MachineError when the runtime says that the engine is not for this machine.

    trt: the product's module; one that has not this question is not asked.
    """
    if not hasattr(trt.Runtime, "get_engine_validity"):
        return
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    with engine.open("rb") as f:
        header = f.read(runtime.engine_header_size)
    validity, bits = runtime.get_engine_validity(header)
    if validity != trt.EngineValidity.INVALID:
        return
    said = [text for bit, text in SAID.items() if int(bits) & bit]
    raise MachineError(
        f"the runtime does not open the engine here: {'; '.join(said) or f'code {int(bits)}'}",
        where=str(engine),
        fix="Use the onnxruntime target of the bundle.",
    )
