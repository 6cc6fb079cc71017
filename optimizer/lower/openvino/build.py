"""Open the lowered model with OpenVINO and inspect its integer kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation.progress import say
from optimizer.harness.bundle import fit_columns
from optimizer.harness.errors import MachineError
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.openvino import devices
from optimizer.harness.runtimes.openvino.run import (
    OpenVinoRunner,
    OpenVinoSettings,
    explain_unpaged,
    write_stateful,
)
from optimizer.lower.onnx.lookup import IDS
from optimizer.lower.openvino.inspection import inspect
from optimizer.recipe.schema import OpenVinoTarget

MINIMUM = "2026.4"
GENAI_MODEL = "openvino_model.xml"  # package/openvino_genai.py makes a folder of it


def fit(section: OpenVinoTarget) -> dict[str, Any]:
    """Return what an OpenVINO target requires of a machine, and settings of the runtime
    (harness/bundle/fit.py)."""
    return {
        "runtime_minimum": MINIMUM,
        "device": section.device,
        "float": section.float,
        "hint": section.hint,
        "dynamic_quantization": section.dynamic_quantization,
    }


def build(section: OpenVinoTarget, model: Path, out: Path) -> dict[str, Any]:
    """Open the lowered model with OpenVINO and inspect its kernels. Returns entries of engine.json.

    With the section's `genai`, the decoder is also written in OpenVINO's two files.

    model: the lower stage's folder
    Raises harness.errors.MachineError where the device is missing, cannot open the model, or would
    answer wrongly (fit_columns.processor).
    """
    devices.check(section.device)
    lowering = json.loads((model / "lowering.json").read_text(encoding="utf-8"))
    integers = any(e["activation"] not in ("float", IDS) for e in lowering["modules"].values())
    needs = {**fit(section), "integer_products": integers}
    needs["device_name"] = devices.read_full_name(section.device)
    engine = {"device": section.device, "fit": needs}
    context = fit_columns.FitContext(engine, describe_machine(), frozenset())
    if unfit := fit_columns.processor(context):
        raise MachineError(
            unfit,
            where="openvino",
            fix="Build it on a processor that has it, or use on_missing: defer.",
        )
    attention = lowering.get("attention")
    why_unpaged = _unpaged(section, attention, model / "model.onnx")
    if attention is not None:
        needs |= {"paged_cache": not why_unpaged, "kv_cache": section.kv_cache}
    if section.rounds_cache and why_unpaged:
        raise MachineError(
            f"int8, and this model's KV cache cannot be paged: {why_unpaged}",
            where="openvino: kv_cache",
            accepted="float",
        )
    settings = OpenVinoSettings.from_fit(needs)
    if section.genai:
        write_stateful(model / "model.onnx", settings, out / GENAI_MODEL)
    with OpenVinoRunner(model / "model.onnx", settings, threads=section.threads) as runner:
        inspected = inspect(model, runner.kernels())
    return {
        "inspected": inspected | ({"unpaged": why_unpaged} if why_unpaged else {}),
        "fit": needs,
    }


def _unpaged(section: OpenVinoTarget, attention: Mapping[str, Any] | None, model: Path) -> str:
    """Explain why a decoder's KV cache cannot be divided into pages in OpenVINO; "" where it
    can."""
    if attention is None:
        return ""
    if section.device == "cpu":
        why = str(attention["unpaged"]) or explain_unpaged(model)
    else:
        why = f"its pages are in the memory of the processor, not of the {section.device}"
    if why:
        say(f"build: the KV cache is not paged, so a server runs each text alone: {why}")
    return why


def float_baselines(section: OpenVinoTarget) -> dict[str, OpenVinoTarget]:
    """Return a section per float type with kernels on the device, as {name in reports: section}."""
    listed = devices.list_capabilities(section.device)
    names: dict[Any, str] = {
        "fp32": "openvino-float",
        "bf16": "openvino-float-bf16",
        "fp16": "openvino-float-fp16",
    }
    return {
        name: section.model_copy(
            update={"float": kind, "dynamic_quantization": 0, "kv_cache": "float"}
        )
        for kind, name in names.items()
        if devices.CAPABILITIES[kind] in listed
    }
