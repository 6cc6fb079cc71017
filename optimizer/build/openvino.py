"""Open the lowered model with OpenVINO, and read from its runtime model what runs in integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.harness.runtimes.openvino.run import (
    CAPABILITIES,
    OpenVinoRunner,
    Settings,
    capabilities,
)
from optimizer.lower.inspect_openvino import inspect
from optimizer.recipe.schema import OpenVinoTarget

MINIMUM = "2026.4"


def fit(section: OpenVinoTarget) -> dict[str, Any]:
    """What a machine must have, and what the runtime is told; see harness/fit.py."""
    return {
        "runtime_minimum": MINIMUM,
        "float": section.float,
        "hint": section.hint,
        "dynamic_quantization": section.dynamic_quantization,
    }


def build(section: OpenVinoTarget, model: Path, _out: Path) -> dict[str, Any]:
    """See stage.py. Raises harness.errors.MachineError when it cannot be opened here."""
    settings = Settings.from_fit(fit(section))
    with OpenVinoRunner(model / "model.onnx", settings, threads=section.threads) as runner:
        return {"inspected": inspect(model, runner.kernels())}


def float_forms(section: OpenVinoTarget) -> dict[str, OpenVinoTarget]:
    """{name in reports: section} of the float that this processor has kernels for."""
    listed = capabilities()
    names: dict[Any, str] = {"fp32": "openvino-float", "bf16": "openvino-float-bf16"}
    return {
        name: section.model_copy(update={"float": kind, "dynamic_quantization": 0})
        for kind, name in names.items()
        if kind not in CAPABILITIES or CAPABILITIES[kind] in listed
    }
