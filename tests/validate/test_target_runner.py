"""The engine hop runs the engine itself; here ONNX Runtime's fused kernels stand in for it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.recipe.schema import TensorRTTarget
from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.hops import UNCUT
from optimizer.validate.ledger.limits.spread import compare_runs
from optimizer.validate.stage import _ledger_gate
from optimizer.validate.target_runner import explain_not_run, explain_not_timed, run_engine
from tests.validate.runs import Run


class Engine(OrtRunner):
    """Other kernels than the graph as written, and `fault` done to every output."""

    fault: float = 1.0

    def infer(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {n: a * self.fault for n, a in super().infer(arrays).items()}


@pytest.mark.parametrize("scheme", ["static", "w8"])
def test_other_kernels_are_within_the_limit_and_a_fault_is_not(
    scheme: str, runs: dict[str, Run]
) -> None:
    m = runs[scheme].materials()
    model = m.model / "model.onnx"
    fuse = scheme == "static"  # for weights alone the CPU's fused kernel quantizes its inputs, too
    asked = m.samples.with_continuations(m.simulated_traces, model)
    spread = m.correct.graph_outputs("state", "fp32")
    limit = max(spread.limits.values())

    def beyond(fault: float) -> bool:
        engine = Engine(model, threads=1, fuse=fuse)
        engine.fault = fault
        return bool(compare_runs(spread.limits, run_engine(m, asked, engine), asked, m.compared)[2])

    assert not beyond(1.0)
    assert beyond(1 + 4 * limit)


def test_an_engine_that_does_not_fit_here_is_not_run_and_the_column_is_named(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    if describe_machine().gpu is not None:
        pytest.skip("there is a GPU")
    run = runs["static"].copy(tmp_path)
    target = TensorRTTarget(runtime="tensorrt-rtx")
    rtx = replace(run, section=run.section.model_copy(update={"target": target}))
    document = {"deferred": False, "engine": "model.engine", "fit": {"runtime_minimum": "1.7"}}
    (run.folder("engine") / "engine.json").write_text(json.dumps(document))
    why = explain_not_run(rtx.materials())
    assert why.startswith("the tensorrt-rtx engine is not run here: ")
    assert any(f"{column}: " in why for column in ("package", "gpu"))
    assert "gpu/suite.py" in explain_not_timed(rtx.materials())
    assert explain_not_timed(run.materials()) == explain_not_run(run.materials()) == ""


def test_a_hop_whose_pieces_cannot_be_run_alone_says_so_and_so_does_the_gate() -> None:
    same = Distance(0.0, 0.0, 1.0, 0.0)
    whole = LedgerEntry("engine", "lowered graph", 1.0, same, True, UNCUT, unproven=UNCUT)
    assert whole.as_dict()["unproven"] == UNCUT
    assert "engine: judged end to end only" in _ledger_gate([whole]).message
    assert "end to end" not in _ledger_gate([replace(whole, unproven="")]).message


def test_a_gate_says_the_beginning_of_much_that_could_not_be_judged_and_the_report_all() -> None:
    same, much = Distance(0.0, 0.0, 1.0, 0.0), "; ".join(f"row {i} of a weight" for i in range(300))
    entry = LedgerEntry("compress", "source torch", 1.0, same, True, "", unproven=much)
    message = _ledger_gate([entry]).message
    assert entry.as_dict()["unproven"] == much
    assert "row 0 of a weight; row 1" in message
    assert message.endswith("optimize explain")
    assert len(message) < 600


def test_an_fp32_engine_is_held_to_fp32_and_not_to_a_coarser_type(runs: dict[str, Run]) -> None:
    m = runs["w8"].materials()
    fine, coarse = (m.correct.graph_outputs("state", p).limits for p in ("fp32", "fp16"))
    assert all(fine[name] < coarse[name] / 100 for name in fine)
