"""Devices that OpenVINO finds, with their precisions and supported properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import MachineError
from .core import open_core

DEVICES = {"cpu": "CPU", "gpu": "GPU", "npu": "NPU"}
PRECISIONS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
CAPABILITIES = {"fp32": "FP32", "bf16": "BF16", "fp16": "FP16"}
"""Name of each precision in OPTIMIZATION_CAPABILITIES."""
PRECISION_PROPERTIES = (
    "INFERENCE_PRECISION_HINT",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE",
    "KV_CACHE_PRECISION",
)
"""Properties that change results."""


def list_devices() -> dict[str, str]:
    """Return {OpenVINO's name: full name} of the present devices, e.g. {"CPU": "AMD EPYC"}.

    Raises MachineError if the package is missing.
    """
    opened = open_core()
    names = [str(name) for name in opened.available_devices]
    return {name: str(opened.get_property(name, "FULL_DEVICE_NAME")) for name in names}


def explain_absent(device: str, present: Mapping[str, str]) -> str:
    """Return the reason why OpenVINO does not find a device; "" if it does.

    device: a key of DEVICES
    present: result of `list_devices`
    """
    kind = DEVICES[device]
    if any(name.partition(".")[0] == kind for name in present):
        return ""
    names = ", ".join(f"{name} ({full})" for name, full in present.items())
    return f"OpenVINO finds no {kind} here; it finds {names or 'no device'}"


def check(device: str) -> None:
    """Raise MachineError if OpenVINO does not find the device, a key of DEVICES."""
    if why := explain_absent(device, list_devices()):
        raise MachineError(
            why,
            where=f"openvino: device {device}",
            fix="Install the device's driver, or use device: cpu.",
        )


def read_full_name(device: str) -> str:
    """Return the full name of a device that OpenVINO lists; of several GPUs the first, on which
    models run."""
    return str(open_core().get_property(DEVICES[device], "FULL_DEVICE_NAME"))


def list_capabilities(device: str = "cpu") -> list[str]:
    """Return from OpenVINO the precisions that a device has kernels for: "FP32", "BF16", "INT8",
    ...

    Raises MachineError if the package is missing.
    """
    return list(open_core().get_property(DEVICES[device], "OPTIMIZATION_CAPABILITIES"))


def refuse_emulation(listed: Sequence[str], precision: str, device: str = "cpu") -> None:
    """Raise MachineError if a device of OpenVINO has no kernels for a precision and would emulate
    it.

    listed: result of `list_capabilities`
    """
    if CAPABILITIES[precision] in listed:
        return
    slow = "; emulation is 31 times slower" if (device, precision) == ("cpu", "bf16") else ""
    others = [name for name, listed_as in CAPABILITIES.items() if listed_as in listed]
    raise MachineError(
        f"this {'processor' if device == 'cpu' else DEVICES[device]} has no {precision} "
        f"(OpenVINO lists {', '.join(listed)}){slow}",
        where="openvino",
        fix=f"Use float: {' or '.join(others)}." if others else "",
    )


def select_supported(
    properties: Mapping[str, Any], supported: Sequence[str], device: str = "cpu"
) -> dict[str, Any]:
    """Return OpenVINO's properties that the device supports, and drop others, e.g. threads on a
    GPU.

    supported: SUPPORTED_PROPERTIES of the device

    Raises MachineError if a dropped property is in PRECISION_PROPERTIES and asks for a precision or
    for integer arithmetic, because results would differ.
    """
    lacking = {name: value for name, value in properties.items() if name not in supported}
    for name in PRECISION_PROPERTIES:
        value = lacking.get(name, 0)
        if name == "KV_CACHE_PRECISION" and value in PRECISIONS.values():
            continue
        if value != 0:
            raise MachineError(
                f"{DEVICES[device]} does not support {name} = {value}",
                where=f"openvino: device {device}",
                fix="Use device: cpu.",
            )
    return {name: value for name, value in properties.items() if name not in lacking}
