"""`optimize import-profile`: kernels belong to the module around their launch."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.profiler import ProfilerActivity, profile, record_function

from optimizer.cli import main
from optimizer.foundation.errors import DataError
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.measure import imported
from tests.measure.products import write_products

PROCESS, OTHER = 5 << 24, 6 << 24
SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME
  (start INT NOT NULL, end INT NOT NULL, globalTid INT, correlationId INT, nameId INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
  (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL, streamId INT NOT NULL,
   correlationId INT, globalPid INT, shortName INT NOT NULL);
CREATE TABLE NVTX_EVENTS
  (start INT NOT NULL, end INT, eventType INT NOT NULL, text TEXT, globalTid INT, textId INT);
"""


def shares(document: dict[str, Any]) -> dict[str, float]:
    return {one["module"]: one["ms"] for one in document["modules"]}


@pytest.fixture
def nsight(tmp_path: Path) -> Path:
    """Two threads, and another process with the same correlation ids. Kernels run long after their
    launches, when other ranges are open."""
    file = tmp_path / "report.sqlite"
    thread, second = PROCESS + 1, PROCESS + 2
    with closing(sqlite3.connect(file)) as base:
        base.executescript(SCHEMA)
        base.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(1, "layer.1/MatMul + layer.1/Add")]
        )
        base.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)",
            [
                (0, 100, 59, "layer.0", thread, None),
                (10, 20, 59, "aten::addmm, seq = 1", thread, None),
                (100, 900, 59, None, thread, 1),
                (0, 900, 59, "layer.2", second, None),
                (950, None, 34, "layer.3", thread, None),  # a mark
            ],
        )
        launches = [
            (15, thread, 1_000_000),
            (150, thread, 2_000_000),
            (40, second, 4_000_000),
            (990, thread, 8_000_000),
        ]
        for number, (start, launcher, duration) in enumerate(launches):
            for process in (PROCESS, OTHER):
                tid = launcher if process == PROCESS else OTHER + 1
                base.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 0)",
                    (start, start + 1, tid, number),
                )
            base.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, ?, ?, 0)",
                (500, 500 + duration, number, PROCESS),
            )
        base.execute(  # launched before the recording began
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (50, 16000050, 0, 7, 99, ?, 0)",
            (PROCESS,),
        )
        base.commit()
    return file


def test_a_kernel_belongs_to_the_innermost_module_around_its_launch(nsight: Path) -> None:
    document = imported.read(nsight)
    assert shares(document) == {"layer.0": 1.0, "layer.1": 2.0, "layer.2": 4.0, "": 24.0}
    assert document["kernels"] == 5
    done = CliRunner().invoke(main, ["import-profile", str(nsight)])
    assert "77.4%      24.000 ms  no module" in done.stdout


def test_a_profile_without_kernels_is_refused_with_how_to_record_them(tmp_path: Path) -> None:
    file = tmp_path / "empty.sqlite"
    with closing(sqlite3.connect(file)) as base:
        base.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
    with pytest.raises(DataError, match="no table CUPTI_ACTIVITY_KIND_KERNEL"):
        imported.read(file)
    for content, problem in (("[]", "no kernels"), ("{}", "not a profile"), ("x", "cannot be")):
        file.write_text(content)
        with pytest.raises(DataError, match=problem):
            imported.read(file)


def test_operators_of_torch_belong_to_the_modules_that_record_function_names(
    tmp_path: Path,
) -> None:
    """Operators outside of every range belong to none; nested ones count once."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        for name, module in model.named_children():
            with record_function(f"model.{name}" if name == "0" else name):
                value = module(torch.ones(64, 64))
        value.sin()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    document = imported.read(tmp_path / "trace.json")
    own = {e.key: e.count for e in profiler.key_averages()}
    assert shares(document).keys() == {"model.0", "1", ""}
    count = {one["module"]: one["kernels"] for one in document["modules"]}
    assert count == {"model.0": 2, "1": 2, "": own["aten::sin"]}  # ones, linear or relu


def test_nodes_of_onnx_runtime_belong_to_the_modules_in_their_names(tmp_path: Path) -> None:
    write_products(tmp_path / "model.onnx")
    with OrtRunner(tmp_path / "model.onnx", threads=1, profile=tmp_path / "profile") as runner:
        runner.infer({"x": np.ones((64, 256), np.float32)})
        document = imported.read(runner.end_profiling())
    assert shares(document).keys() == {"layer.0.dense", "layer.1", ""}


def test_the_time_of_a_loop_counts_once_and_launches_on_a_gpu_are_no_times(tmp_path: Path) -> None:
    def event(node: str, operator: str, dur: int, provider: str) -> dict[str, Any]:
        about = {"op_name": operator, "provider": f"{provider}ExecutionProvider"}
        return {"cat": "Node", "name": f"{node}_kernel_time", "dur": dur, "args": about}

    events = [event("layer.0/MatMul", "MatMul", 2000, "CPU"), event("Loop", "Loop", 2100, "CPU")]
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(events))
    assert shares(imported.read(file)) == {"layer.0": 2.0}
    events.append(event("Cast", "Cast", 4, "CUDA"))
    file.write_text(json.dumps(events))
    with pytest.raises(DataError, match="CUDAExecutionProvider are timed by their launches"):
        imported.read(file)
