"""The devices that OpenVINO finds, what each can compute in, and which properties each knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import MachineError
from .core import core

DEVICES = {"cpu": "CPU", "gpu": "GPU", "npu": "NPU"}
PRECISIONS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
CAPABILITIES = {"fp32": "FP32", "bf16": "BF16", "fp16": "FP16"}
"""What OPTIMIZATION_CAPABILITIES lists for each."""
DECIDES = ("INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "KV_CACHE_PRECISION")
"""The properties that decide what is computed."""


def available() -> dict[str, str]:
    """{OpenVINO's name: the maker's} of the devices that are here: {"CPU": "AMD EPYC"}.

    Raises MachineError when the package is missing."""
    opened = core()
    names = [str(name) for name in opened.available_devices]
    return {name: str(opened.get_property(name, "FULL_DEVICE_NAME")) for name in names}


def absent(device: str, present: Mapping[str, str]) -> str:
    """Why a device of DEVICES is not to be had, or "". present: of `available`."""
    kind = DEVICES[device]
    if any(name.partition(".")[0] == kind for name in present):
        return ""
    names = ", ".join(f"{name} ({full})" for name, full in present.items())
    return f"OpenVINO finds no {kind} here; it finds {names or 'no device'}"


def check(device: str) -> None:
    """Raises MachineError where OpenVINO does not find the device."""
    if why := absent(device, available()):
        raise MachineError(
            why,
            where=f"openvino: device {device}",
            fix="Install the device's driver, or use device: cpu.",
        )


def full_name(device: str) -> str:
    """The maker's name of a device that is here; of several of a kind the first's, which is the
    one that runs."""
    return str(core().get_property(DEVICES[device], "FULL_DEVICE_NAME"))


def capabilities(device: str = "cpu") -> list[str]:
    """What a device has kernels for, as OpenVINO names it: "FP32", "BF16", "INT8", ...

    Raises MachineError when the package is missing."""
    return list(core().get_property(DEVICES[device], "OPTIMIZATION_CAPABILITIES"))


def refuse_emulation(listed: Sequence[str], precision: str, device: str = "cpu") -> None:
    """Raises MachineError for a precision that is not among a device's capabilities."""
    if CAPABILITIES[precision] in listed:
        return
    slow = "; emulated, it is 31 times slower" if (device, precision) == ("cpu", "bf16") else ""
    others = [name for name, listed_as in CAPABILITIES.items() if listed_as in listed]
    raise MachineError(
        f"this {'processor' if device == 'cpu' else DEVICES[device]} has no {precision} "
        f"(OpenVINO lists {', '.join(listed)}){slow}",
        where="openvino",
        fix=f"Use float: {' or '.join(others)}." if others else "",
    )


def known(
    properties: Mapping[str, Any], supported: Sequence[str], device: str = "cpu"
) -> dict[str, Any]:
    """Of what OpenVINO is to be told, what the device takes (its SUPPORTED_PROPERTIES).

    One that it lacks is left out: a GPU takes no number of threads, and what cannot be told to
    round does not round. Raises MachineError for one that asks for a precision, or for integers,
    which it then would not get."""
    lacking = {name: value for name, value in properties.items() if name not in supported}
    for name in DECIDES:
        value = lacking.get(name, 0)
        if name == "KV_CACHE_PRECISION" and value in PRECISIONS.values():
            continue
        if value != 0:
            raise MachineError(
                f"{DEVICES[device]} cannot be told {name} = {value}",
                where=f"openvino: device {device}",
                fix="Use device: cpu.",
            )
    return {name: value for name, value in properties.items() if name not in lacking}
