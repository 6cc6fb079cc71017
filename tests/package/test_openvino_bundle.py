"""A bundle for OpenVINO: what it needs, how it opens, and what it keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.commands.bundle import examine
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.errors import MachineError
from optimizer.harness.runtimes.machine import Machine, describe_machine
from optimizer.harness.runtimes.openvino.devices import explain_absent, list_devices
from tests.package.bundles import small_bundle

OPENVINO = "{runtime: openvino, threads: 1, hint: throughput}"
TEXTS = ["what a lovely film", "a bad one"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    targets = (OPENVINO, small_bundle.ORT)
    return small_bundle.make(tmp_path_factory.mktemp("openvino"), targets) / "bundle"


def values(bundle: Path, runtime: str, **options: object) -> np.ndarray:
    with Bundle(bundle, runtime=runtime, **options) as opened:  # type: ignore[arg-type]
        return np.asarray(opened.values(TEXTS))


def test_it_says_what_to_install_and_what_the_runtime_is_told(bundle: Path) -> None:
    lines = (bundle / "requirements.txt").read_text().splitlines()
    assert any(line.startswith("openvino==") for line in lines)
    (entry, _) = json.loads((bundle / "manifest.json").read_text())["engines"]
    assert entry["fit"].pop("device_name") == list_devices()["CPU"]
    assert entry["fit"] == {
        "device": "cpu",
        "runtime_minimum": "2026.4",
        "float": "fp32",
        "hint": "throughput",
        "dynamic_quantization": 0,
        "integer_products": True,
    }


def test_it_answers_as_onnxruntime_does(bundle: Path) -> None:
    np.testing.assert_allclose(values(bundle, "openvino"), values(bundle, "onnxruntime"), atol=0.02)


def test_what_it_compiles_is_kept_once_and_used_again(bundle: Path, tmp_path: Path) -> None:
    plain = values(bundle, "openvino")
    assert np.array_equal(values(bundle, "openvino", cache=tmp_path), plain)
    (kept,) = tmp_path.glob("*/model.engine")
    written = kept.stat().st_mtime_ns
    assert np.array_equal(values(bundle, "openvino", cache=tmp_path), plain)
    assert [p.stat().st_mtime_ns for p in tmp_path.glob("*/model.engine")] == [written]


def test_another_processor_has_a_compiled_model_of_its_own(bundle: Path, tmp_path: Path) -> None:
    for cpu in ("one processor", "another"):
        here = describe_machine()
        machine = Machine(here.os, here.architecture, here.packages, cpu=cpu, cores=1)
        values(bundle, "openvino", cache=tmp_path, machine=machine)
    assert len(list(tmp_path.glob("*/model.engine"))) == 2


def test_a_folder_that_keeps_nothing_is_said_and_no_reason_not_to_answer(
    bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    lines: list[str] = []
    answers = values(bundle, "openvino", cache=tmp_path / "cache", say=lines.append)
    assert np.array_equal(answers, values(bundle, "openvino"))
    assert any("compiled at each start" in line for line in lines)


def test_where_the_package_is_missing_the_next_engine_answers(bundle: Path) -> None:
    here = describe_machine()
    packages = {n: v for n, v in here.packages.items() if n != "openvino"}
    machine = Machine(here.os, here.architecture, packages, cores=1)
    lines: list[str] = []
    with Bundle(bundle, machine=machine, say=lines.append) as opened:
        assert opened.engine["runtime"] == "onnxruntime"
    assert any("openvino is not installed" in line for line in lines)


def test_where_the_device_is_missing_the_next_engine_answers_and_none_is_taken_in_its_place(
    bundle: Path, tmp_path: Path
) -> None:
    if not explain_absent("npu", list_devices()):
        pytest.skip("this machine has an NPU")
    other = tmp_path / "bundle"
    shutil.copytree(bundle, other)

    def on_an_npu(manifest: dict[str, Any]) -> None:
        entry = manifest["engines"][0]
        entry["device"] = entry["fit"]["device"] = "npu"

    small_bundle.edited(other, on_an_npu)
    lines: list[str] = []
    with Bundle(other, say=lines.append) as opened:
        assert opened.engine["runtime"] == "onnxruntime"
    assert any("OpenVINO finds no NPU here; it finds CPU" in line for line in lines)
    with pytest.raises(MachineError, match=r"finds no NPU here.*Install the device's driver"):
        Bundle(other, runtime="openvino")
    rows = examine.examine_engines(other)
    assert [row["how"] for row in rows] == [None, "load"]
    assert "OpenVINO finds no NPU here" in rows[0]["why"]
