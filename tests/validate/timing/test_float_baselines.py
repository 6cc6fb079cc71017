"""The float baseline that a candidate must beat: the fastest accurate one of its runtime here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from optimizer.data.datasets import read_samples
from optimizer.harness.bundle.bench import System
from optimizer.harness.runtimes.openvino.devices import CAPABILITIES, list_capabilities
from optimizer.lower.openvino.build import float_baselines as openvino_baselines
from optimizer.recipe.schema import Latency, OpenVinoTarget
from optimizer.validate.gates import Gate
from optimizer.validate.quality import answers
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.timing import batch_timing, cells, float_baselines
from optimizer.validate.timing.openings import Openings
from tests.validate.runs import Run, for_openvino
from tests.validate.test_stage import changed

TARGET = OpenVinoTarget(runtime="openvino")
BASELINES = {*openvino_baselines(TARGET)}  # of this processor; some have bf16, some fp16 too
COARSER = BASELINES - {"openvino-float"}


def test_the_forms_are_those_that_the_processor_has_kernels_for() -> None:
    baselines = openvino_baselines(TARGET)
    for kind in ("bf16", "fp16"):
        assert (f"openvino-float-{kind}" in baselines) == (
            CAPABILITIES[kind] in list_capabilities()
        )
    for name, section in baselines.items():
        kind = "fp32" if name == "openvino-float" else name.rpartition("-")[2]
        assert section.float == kind
        assert CAPABILITIES[kind] in list_capabilities()


def test_a_runtime_without_float_forms_has_one(runs: dict[str, Run]) -> None:
    baselines = float_baselines.list_baselines(runs["static"].materials())
    assert list(baselines.sections) == list(baselines.compared) == ["onnxruntime-float"]


def compared(m: RunArtifacts, verdict: str) -> float_baselines.FloatBaselines:
    """Judge the baselines, with this verdict for the answers of each."""
    rows = read_samples(m.section.validate_.data)[:8]
    reference = answers.answer_by_reference(m, rows, None)
    assert reference is not None

    def compare(_reference: Any, own: Any) -> tuple[list[Gate], None]:
        assert len(own.text) == len(rows)
        return [Gate("quality.cosine", verdict, 0.0, None, None, "")], None

    return float_baselines.judge_baselines(m, rows, reference, compare)


@pytest.mark.skipif(not COARSER, reason="this processor has neither bf16 nor fp16")
@pytest.mark.parametrize("verdict", ["pass", "fail", "inconclusive"])
def test_a_coarser_float_is_compared_with_only_where_it_keeps_the_margins(
    verdict: str, runs: dict[str, Run], tmp_path: Path
) -> None:
    baselines = compared(for_openvino(runs["static"], tmp_path).materials(), verdict)
    assert set(baselines.sections) == BASELINES
    assert set(baselines.compared) - {"openvino-float"} == (COARSER if verdict == "pass" else set())
    assert "openvino-float" in baselines.compared
    assert {baselines.figures[name]["verdict"] for name in COARSER} == {verdict}


@pytest.mark.skipif(not COARSER, reason="this processor has neither bf16 nor fp16")
@pytest.mark.parametrize(("max_kl", "verdict"), [(0.5, "pass"), (1e-12, "fail")])
def test_the_same_holds_for_text_generation(
    max_kl: float, verdict: str, decoder_runs: dict[str, Run], tmp_path: Path
) -> None:
    run = changed(for_openvino(decoder_runs["rtn"], tmp_path), max_kl=max_kl)
    m = run.materials()
    baselines = float_baselines.judge_baselines_on_windows(
        m, read_samples(m.section.validate_.data)[:40]
    )
    assert set(baselines.sections) == BASELINES
    assert set(baselines.compared) - {"openvino-float"} == (COARSER if verdict == "pass" else set())
    figures = baselines.figures["openvino-float-bf16"]
    assert figures["verdict"] == verdict
    assert [g["name"] for g in figures["gates"]] == ["quality.perplexity", "quality.max_kl"]


class Clock:
    """Systems with given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("optimizer.harness.bundle.bench.time.perf_counter", lambda: self.now)

    def system(self, seconds: float, several: Callable[[], float] | None = None) -> System:
        """Return a system. several: function that returns the seconds of more texts than one"""

        def forward(texts: Sequence[str]) -> None:
            self.now += seconds if several is None or len(texts) == 1 else several()

        return System(lambda texts, length: texts, forward, lambda outputs, arrays: outputs)


@pytest.mark.parametrize("seconds", [(3.0, 2.0), (2.0, 3.0)])
def test_the_ratio_is_to_the_fastest(
    seconds: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    names = ("openvino-float", "openvino-float-bf16")
    systems = {n: clock.system(s) for n, s in zip(names, seconds, strict=True)}
    systems[cells.CANDIDATE] = clock.system(1.0)
    latency = Latency(iterations=8, max_seconds=0)
    timer = batch_timing.BatchTimer(["a b c d"], latency, 1, Openings({}))
    section = cells.time_cells(timer, systems, [(1, 4)], cells.Timing(latency, 1, 1), names)
    (cell,) = section["cells"]
    fastest = names[min((0, 1), key=lambda i: seconds[i])]
    assert (cell["ratio"]["to"], cell["ratio"]["median"]) == (fastest, pytest.approx(0.5))
    assert set(cell["systems"]) == set(systems)
    (gate,) = batch_timing.judge(section, latency, {"eligible": 1, "wider": []})
    assert f"times the time of {fastest} at" in gate.message


@pytest.mark.parametrize(("alone", "further"), [(2.0, False), (0.5, True)])
def test_once_one_cell_has_failed_the_others_are_not_timed_until_decided(
    alone: float, further: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two texts the candidate's time scatters so that the first look does not decide."""
    clock, random_ = Clock(monkeypatch), random.Random(0)
    candidate = clock.system(alone, lambda: random_.uniform(0.5, 1.4))
    systems = {"float": clock.system(1.0), cells.CANDIDATE: candidate}
    latency = Latency(iterations=8, max_seconds=60)
    timer = batch_timing.BatchTimer(["a b c d"], latency, 1, Openings({}))
    timing = cells.Timing(latency, 1, 2)
    section = cells.time_cells(timer, systems, [(1, 4), (2, 4)], timing, ["float"])
    fewest, other = (cell["runs"] for cell in section["cells"])
    assert (other > fewest) is further
