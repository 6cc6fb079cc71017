"""The gate on the latency gain of the smaller model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness import contract as contracts
from optimizer.harness.inputs.text import NEUTRAL
from optimizer.recipe.schema import Latency, TargetSection
from optimizer.recipe.targets import OnnxRuntimeTarget, OpenVinoTarget, TensorRTTarget
from optimizer.timing.stopping_rules import PrecisionRule, RatioQuestion, SequentialTest
from optimizer.validate.gates import UNMEASURED
from optimizer.validate.timing import latency_gain, speed_gates
from tests.reduce.smaller import loaded


def section(low: float | None, high: float | None) -> dict[str, Any]:
    """ratio: time of the smaller model / time of the unreduced one."""
    place = {"batch": 1, "sequence": 128}
    needed = {"rounds": 80, "seconds": 9.0}
    ratio = {"ratio": 0.63, "interval": [low, high], "needed": needed}
    return {"goal": 1.6, "least": 1.52, "form": "the same quantization", **place, **ratio}


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.6, 0.65), "pass"),  # 1.54 times as fast at least
        ((0.6, 0.67), "inconclusive"),
        ((0.66, 0.7), "fail"),  # 1.515 at most
        ((None, None), "inconclusive"),
    ],
)
def test_it_is_decided_by_the_whole_interval(
    interval: tuple[float | None, float | None], verdict: str
) -> None:
    decided = latency_gain.judge(section(*interval), 1)
    assert decided.verdict == verdict
    assert decided.limit == 1.52
    assert decided.measured == pytest.approx(1 / 0.63)


def test_the_gate_times_three_openings_of_each_model_and_the_table_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, opened = loaded("bert", tmp_path), list[str]()
    (output,) = contracts.read(source / "contract.json").outputs

    class Session:
        def infer(self, arrays: dict[str, Any]) -> dict[str, Any]:
            sizes = dict(zip(("batch", "sequence"), arrays["input_ids"].shape, strict=True))
            shape = [sizes[a] if isinstance(a, str) else a for a in output.axes]
            return {output.name: np.ones(shape, np.float32)}

        def close(self) -> None:
            pass

    def open_onnx(_: TargetSection, model: Path, threads: int) -> Session:
        opened.append(model.parent.name)
        return Session()

    monkeypatch.setattr(latency_gain, "open_onnx", open_onnx)
    latency = Latency(iterations=5, sequence=(8,), must_beat_float=False)
    target = OnnxRuntimeTarget(runtime="onnxruntime")
    cell = latency_gain.GainCell(target, latency, NEUTRAL)
    models = [latency_gain.ModelFolders(source, source / name) for name in ("whole", "smaller")]
    gain = cell.compare(*models, SequentialTest(RatioQuestion.share_rounds(1.0, 5), 5, None))
    assert sorted(opened) == ["smaller"] * 3 + ["whole"] * 3
    assert (gain["runs"], len(gain["looks"]), gain["sequence"]) == (6, 1, 8)
    assert gain["interval"][0] < gain["ratio"] < gain["interval"][1]
    opened.clear()
    cell.compare(*models, PrecisionRule(0.05, 0.0))
    assert sorted(opened) == ["smaller", "whole"]


def test_a_failure_says_what_was_reached_and_what_to_do() -> None:
    message = latency_gain.judge(section(0.66, 0.7), 1).message
    assert "1.59 times as fast as the unreduced model" in message
    assert "at most 1.515, required 1.520" in message
    assert "set reduce.goal.latency_gain to a gain that was reached" in message


def test_the_message_names_what_the_gain_is_over() -> None:
    passed = section(0.6, 0.65)
    assert (
        "unreduced model in the same quantization at batch 1"
        in latency_gain.judge(passed, 1).message
    )
    message = latency_gain.judge({**passed, "form": "float (fp32)"}, 1).message
    assert "the unreduced model in float (fp32) at batch 1" in message


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (OnnxRuntimeTarget(runtime="onnxruntime"), "fp32"),
        (OpenVinoTarget(runtime="openvino", float="bf16"), "fp32"),
        (TensorRTTarget(runtime="tensorrt-rtx", float="fp16"), "fp16"),
    ],
)
def test_the_float_that_a_gain_is_over_is_named(target: TargetSection, kind: str) -> None:
    """Another float of the same runtime may be several times as fast."""
    cell = latency_gain.GainCell(target, Latency(must_beat_float=False), [], "float")
    assert cell.full_target.computes_in == kind


def test_the_message_tells_how_many_rounds_would_decide() -> None:
    assert "about 80 rounds would decide" in latency_gain.judge(section(0.6, 0.7), 2).message


def test_a_gain_that_could_not_be_timed_does_not_pass() -> None:
    (gate,) = speed_gates.list_unmeasured(
        Latency(must_beat_float=False), "no engine", (latency_gain.NAME, 1.52)
    )
    assert (gate.name, gate.verdict, gate.limit) == ("speed.latency_gain", UNMEASURED, 1.52)
