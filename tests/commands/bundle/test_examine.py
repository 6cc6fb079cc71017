"""Targets that a machine can build and run, from a description of the machine."""

from pathlib import Path

import pytest

from optimizer.commands.bundle import examine
from optimizer.harness.runtimes.machine import Gpu, Machine, describe_machine
from tests.package.bundles import small_bundle

CARD = Gpu("a card", "8.9", "580.65")
EVERYTHING = {"onnxruntime-gpu": "1.31.1", "tensorrt-rtx": "1.7.1.116", "cuda-bindings": "13.0"}


def rows(machine: Machine) -> dict[tuple[str, str], dict[str, object]]:
    return {(t["runtime"], t["provider"]): t for t in examine.examine(machine)["targets"]}


def test_what_is_missing_has_a_reason_and_what_can_be_installed_a_line() -> None:
    found = rows(Machine("linux", "x86_64"))
    assert not any(row["runs"] or row["builds"] for row in found.values())
    assert all(row["reason"] for row in found.values())
    assert found["onnxruntime", "cpu"]["fix"] == "pip install onnxruntime"


def test_a_gpu_makes_its_runtimes_run_and_nothing_else_change() -> None:
    runners = frozenset({"onnxruntime", "tensorrt-rtx", "tensorrt"})
    without = rows(Machine("linux", "x86_64", EVERYTHING, None, runners))
    with_one = rows(Machine("linux", "x86_64", EVERYTHING, CARD, runners))
    ran = {name for name, row in with_one.items() if row["runs"] and not without[name]["runs"]}
    assert ran == {("onnxruntime", "cuda"), ("tensorrt-rtx", "cuda")}
    assert with_one["onnxruntime", "cpu"] == without["onnxruntime", "cpu"]
    assert without["tensorrt-rtx", "cuda"]["builds"]  # it needs no GPU to build


def test_targets_of_other_programs_need_one_of_their_packages_and_are_run_by_them() -> None:
    bare = rows(Machine("linux", "x86_64"))["onnxruntime-web", ""]
    assert (bare["builds"], bare["reason"]) == (False, "onnxruntime is not installed")
    here = rows(Machine("linux", "x86_64", {"onnxruntime": "1.31.1"}))["onnxruntime-web", ""]
    assert (here["builds"], here["fix"]) == (True, "")
    assert here["reason"] == "run by a browser (python -m harness web)"


def test_without_a_gpu_a_runtime_of_the_gpu_has_both_reasons_and_no_fix() -> None:
    row = rows(Machine("linux", "x86_64", {"onnxruntime": "1.31.1"}))["onnxruntime", "tensorrt-rtx"]
    assert (row["builds"], row["fix"]) == (False, "")
    missing = "onnxruntime-ep-nv-tensorrt-rtx is not installed"
    assert row["reason"] == f"no NVIDIA GPU was found; {missing}"


@pytest.mark.parametrize(("flags", "ready"), [(("avx2",), False), (("avx2", "avx_vnni"), True)])
def test_a_processor_whose_integer_products_saturate_is_not_simply_ready(
    flags: tuple[str, ...], ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "_devices", lambda *_: {"openvino": {"CPU": "a processor"}})
    machine = Machine("linux", "x86_64", {"openvino": "2026.4.1"}, cpu_features=flags)
    row = rows(machine)["openvino", "cpu"]
    assert (row["runs"], row["reason"] == "ready") == (True, ready)


def test_devices_that_openvino_does_not_find_are_not_built_for() -> None:
    found = rows(describe_machine())
    present = examine.examine()["devices"]["openvino"]
    for device in ("cpu", "gpu", "npu"):
        here = any(name.startswith(device.upper()) for name in present)
        row = found["openvino", device]
        assert row["builds"] == row["runs"] == here
        assert here or f"finds no {device.upper()} here; it finds CPU" in str(row["reason"])


def test_of_a_bundle_it_says_of_each_engine_whether_it_runs_and_why(tmp_path: Path) -> None:
    made = small_bundle.make(tmp_path, (small_bundle.ORT,)) / "bundle"
    here = Machine("linux", "x86_64", {"onnxruntime": "1.31.1"})
    (row,) = examine.examine_engines(made, here)
    assert (row["target"], row["how"]) == ("onnxruntime-cpu", "load")
    assert row["why"].startswith("fits: ")
    (made / "model" / "onnxruntime-cpu" / "model.onnx").write_bytes(b"x")
    (row,) = examine.examine_engines(made, here)
    assert row["how"] is None
    assert row["why"].startswith("digest: damaged")
