"""OpenVINO devices: missing devices and unsupported properties are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.errors import MachineError
from optimizer.harness.runtimes.openvino import devices, run
from optimizer.harness.runtimes.openvino.run import OpenVinoRunner, OpenVinoSettings
from tests.harness import small_model

FOUND = {"CPU": "a processor", "GPU.0": "a card", "GPU.1": "another"}


def test_a_device_is_found_by_its_kind_and_a_missing_one_named_beside_what_there_is() -> None:
    assert [devices.explain_absent(d, FOUND) for d in ("cpu", "gpu")] == ["", ""]
    assert devices.explain_absent("npu", FOUND) == (
        "OpenVINO finds no NPU here; it finds CPU (a processor), GPU.0 (a card), GPU.1 (another)"
    )


def test_of_this_machine_it_finds_the_processor() -> None:
    assert devices.list_devices()["CPU"] == devices.read_full_name("cpu")


def test_a_model_for_a_device_that_is_missing_is_not_opened_on_another(tmp_path: Path) -> None:
    missing = next(
        (d for d in ("npu", "gpu") if devices.explain_absent(d, devices.list_devices())), None
    )
    if missing is None:
        pytest.skip("this machine has a GPU and an NPU")
    model = small_model.model(tmp_path / "model.onnx")
    with pytest.raises(MachineError, match=rf"device {missing}: OpenVINO finds no .* finds CPU"):
        OpenVinoRunner(model, OpenVinoSettings(device=missing))


def test_a_processor_is_told_everything() -> None:
    """The CPU gets every property."""
    assert run._properties(OpenVinoSettings(hint="throughput", block=64), 3) == {
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 64,
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_NUM_THREADS": 3,
        "PERFORMANCE_HINT": "THROUGHPUT",
        "ENABLE_CPU_PINNING": False,
    }


@pytest.mark.parametrize("settings", [OpenVinoSettings(), OpenVinoSettings(precision="fp16")])
def test_a_property_that_a_device_lacks_and_that_asks_for_nothing_is_left_out(
    settings: OpenVinoSettings,
) -> None:
    wanted = {**settings.precision_properties, "INFERENCE_NUM_THREADS": 2}
    told = devices.select_supported(wanted, ["INFERENCE_PRECISION_HINT", "PERFORMANCE_HINT"], "npu")
    assert told == {"INFERENCE_PRECISION_HINT": wanted["INFERENCE_PRECISION_HINT"]}


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        (OpenVinoSettings(), "INFERENCE_PRECISION_HINT"),
        (OpenVinoSettings(block=64), "DYNAMIC_QUANTIZATION_GROUP_SIZE"),
        (OpenVinoSettings(cache="int8"), "KV_CACHE_PRECISION"),
    ],
)
def test_what_decides_the_answer_is_never_left_out(
    settings: OpenVinoSettings, lacking: str
) -> None:
    wanted: dict[str, Any] = settings.precision_properties
    with pytest.raises(MachineError, match=f"GPU does not support {lacking}"):
        devices.select_supported(wanted, [name for name in wanted if name != lacking], "gpu")


def test_a_precision_is_never_forced_on_what_lacks_it() -> None:
    devices.refuse_emulation(["FP32", "BF16"], "bf16")
    devices.refuse_emulation(["FP16", "INT8"], "fp16", "npu")
    with pytest.raises(MachineError, match=r"no bf16 \(OpenVINO lists FP32, INT8\); emulation"):
        devices.refuse_emulation(["FP32", "INT8"], "bf16")
    with pytest.raises(MachineError, match=r"this NPU has no fp32 .*Use float: fp16\."):
        devices.refuse_emulation(["FP16", "INT8"], "fp32", "npu")
