"""The engine hop, asked of the engine itself; here ONNX Runtime's fused kernels stand for it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.machine import this_machine
from optimizer.harness.runtimes.ort import OrtRunner
from optimizer.recipe import TensorRTTarget
from optimizer.validate.materials import Materials
from optimizer.validate.on_gpu import compared, not_here, untimed
from tests.validate.runs import Run


class Engine(OrtRunner):
    """Other kernels than the graph as written, and `fault` done to every output."""

    fault: float = 1.0

    def infer(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {n: a * self.fault for n, a in super().infer(arrays).items()}


def materials(run: Run) -> Materials:
    made = run.materials()
    made.quantization_error = 0.01
    return made


@pytest.mark.parametrize("scheme", ["static", "w8"])
def test_other_kernels_are_within_the_limit_and_a_fault_is_not(
    scheme: str, runs: dict[str, Run]
) -> None:
    m = materials(runs[scheme])
    model = m.model / "model.onnx"
    good = Engine(model, threads=1)
    _, limit, measured = compared(m, good)
    assert measured.worst <= limit
    bad = Engine(model, threads=1)
    bad.fault = 1 + 4 * limit
    assert compared(m, bad)[2].worst > limit


def test_an_engine_that_does_not_fit_here_is_not_asked_and_the_column_is_said(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    if this_machine().gpu is not None:
        pytest.skip("there is a GPU")
    run = runs["static"].copy(tmp_path)
    target = TensorRTTarget(runtime="tensorrt-rtx")
    rtx = replace(run, section=run.section.model_copy(update={"target": target}))
    document = {"deferred": False, "engine": "model.engine", "fit": {"runtime_minimum": "1.7"}}
    (run.folder("engine") / "engine.json").write_text(json.dumps(document))
    why = not_here(rtx.materials())
    assert why.startswith("the tensorrt-rtx engine is not run here: ")
    assert any(f"{column}: " in why for column in ("package", "gpu"))
    assert "gpu_suite" in untimed(rtx.materials())
    assert untimed(run.materials()) == not_here(run.materials()) == ""
