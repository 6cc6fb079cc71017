"""report.json of a text-generation model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle import bench
from optimizer.recipe.schema import Latency
from optimizer.validate.stage import STAGE
from optimizer.validate.timing import cells, generation_timing
from optimizer.validate.timing.openings import Openings
from tests.validate.runs import Run
from tests.validate.test_stage import changed


def test_a_decoder_is_judged_by_nats_agreement_and_time_between_tokens(
    decoder_runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_timing.bench, "read_peak", lambda _: 1)
    latency = decoder_runs["token"].section.validate_.latency
    rounds = math.ceil(bench.fewest(99) / (latency.new_tokens - 1))
    asked_of_time = {"iterations": rounds, "max_seconds": 0, "p99_ms": 10_000.0}
    timed = latency.model_copy(update={"must_beat_float": True, **asked_of_time})
    asked = {"max_drop": 0.2, "max_kl": 0.5, "min_top1": 0.5, "latency": timed}
    run = changed(decoder_runs["token"], **asked)
    STAGE.run(run.section, run.artifacts, out=tmp_path)
    found = json.loads((tmp_path / "report.json").read_text())
    verdicts = {g["name"]: g["verdict"] for g in found["gates"]}
    assert list(verdicts) == [
        "ledger",
        "quality.perplexity",
        "quality.max_kl",
        "quality.min_top1",
        "speed.must_beat_float",
        "speed.p99_ms",
    ]
    quality = {"quality.perplexity", "quality.max_kl", "quality.min_top1", "ledger"}
    assert {verdicts[name] for name in quality} == {"pass"}
    assert verdicts["speed.p99_ms"] == "pass"
    assert found["quality"]["divergence"]["prompts"] == 16
    assert found["quality"]["window_tokens"] == 48
    (cell,) = found["speed"]["cells"]
    assert set(cell["systems"]) == {"onnxruntime-float", "candidate"}


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [([0.3, 0.4], "pass"), ([1.1, 1.3], "fail"), ([0.9, 1.1], "inconclusive")],
)
def test_the_time_between_tokens_must_beat_float_and_not_the_first_token(
    interval: list[float], verdict: str
) -> None:
    ratio = {
        "to": "openvino-float-bf16",
        "ttft": {"median": 2.0, "interval": [1.9, 2.1]},
        "inter_token": {"median": sum(interval) / 2, "interval": interval},
    }
    cell = {"batch": 1, "prompt": 128, "ratio": ratio, "systems": {}}
    (gate,) = generation_timing.judge({"cells": [cell]}, Latency(), {})
    assert gate.verdict == verdict
    assert "between tokens of openvino-float-bf16 at batch 1, prompts of 128 tokens" in gate.message


@pytest.mark.parametrize("milliseconds", [(3.0, 2.0), (2.0, 3.0)])
def test_the_time_between_tokens_is_compared_with_the_fastest_floats(
    milliseconds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("openvino-float", "openvino-float-bf16")
    medians = {**dict(zip(names, milliseconds, strict=True)), cells.CANDIDATE: 1.0}

    def timed(
        systems: Any, cell: Any, baseline: str = "", more: Any = None, opening: int = 0
    ) -> dict[str, Any]:
        told = {n: {"inter_token": {"p50": medians[n]}} for n in systems}
        rounds = {n: [(9.0, [medians[n]] * 3)] * 42 for n in systems}
        assert more is None or (opening, more(rounds)) == (14, 0)
        ratio = {"to": baseline, "inter_token": {}}
        return {"cells": [{"batch": cell[0], "prompt": cell[1], "systems": told, "ratio": ratio}]}

    latency = Latency(iterations=40, max_seconds=0)
    timer = generation_timing.GenerationTimer(None, None, [], latency, 1, Openings({}))
    monkeypatch.setattr(generation_timing.GenerationTimer, "time", lambda _, *given: timed(*given))
    timing = cells.Timing(latency, 1, 1)
    section = cells.time_cells(timer, dict.fromkeys(medians), [(1, 4)], timing, names)
    (cell,) = section["cells"]
    fastest = min(names, key=medians.__getitem__)
    assert cell["ratio"]["to"] == fastest
    assert set(cell["systems"]) == set(medians)
    assert cell["ratio"]["inter_token"]["interval"] == pytest.approx([1 / medians[fastest]] * 2)
