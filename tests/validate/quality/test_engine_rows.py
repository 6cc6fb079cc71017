"""Rows of the quality gates that are not the engine's are caught at hop `rows`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from optimizer.data.datasets import read_samples
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.validate import stage, target_runner
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.pieces import pieces
from optimizer.validate.materials import Materials
from optimizer.validate.quality import answers, engine_rows, evaluation, perplexity
from optimizer.validate.quality.engine_rows import EngineRows
from tests.validate import decoder_runs as decoders
from tests.validate.runs import Run

Fault = Callable[[pytest.MonkeyPatch], None]


def rows_entry(run: Run) -> LedgerEntry:
    """Hop `rows` of a run."""
    m: Materials = run.materials()
    settings = m.section.validate_
    data = {"validate.data": read_samples(settings.data)}
    sets = evaluation.read_sets(settings, data, m.contract)
    seen = EngineRows(m, "cpu")
    stage._compare_sets(m, sets, answers.answer_by_reference(m, sets[evaluation.FIRST], None), seen)
    return seen.entry()


@pytest.fixture(scope="module")
def decoder_run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("decoder")
    wanted = decoders.decoder_recipe(str(tiny_llama), root, decoders.SCHEMES["token"])
    return decoders.make_decoder(root, wanted)


@pytest.fixture(params=["classifier_run", "decoder_run"])
def run(request: pytest.FixtureRequest) -> Run:
    made: Run = request.getfixturevalue(request.param)
    return made


class FloatGraph(pieces.GraphRunner):
    """The float graph under the name of the lowered model."""

    def __init__(self, m: Materials) -> None:
        super().__init__(m.graph / "model.onnx", threads=1)
        self.model = m.model / "model.onnx"


def reads_the_float_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered(m: Materials, device: str) -> OrtRunner:
        return pieces.GraphRunner(m.graph / "model.onnx", device=device, threads=1)

    monkeypatch.setattr(target_runner, "open_lowered", lowered)


def runs_the_float_graph_under_the_models_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_runner, "open_lowered", lambda m, _: FloatGraph(m))


def takes_the_baselines_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, score = answers.answer, perplexity.score

    def baselines(m: Any, runner: Any, rows: Sequence[Any], label: str) -> Any:
        mine = "candidate" not in label
        return answer(m, runner if mine else answers.TorchRunner(m), rows, label)

    def twice(windows: Any, baseline: Any, candidate: Any) -> Any:
        del candidate
        return score(windows, baseline, baseline)

    monkeypatch.setattr(answers, "answer", baselines)
    monkeypatch.setattr(perplexity, "score", twice)


def test_the_engines_own_rows_are_fine(run: Run) -> None:
    entry = rows_entry(run)
    assert (entry.hop, entry.ok, entry.problems) == ("rows", True, ())
    assert entry.measured == engine_rows.SAME


FOUND: Mapping[Fault, tuple[str, ...]] = {
    reads_the_float_graph: ("measured with", "other bits"),
    runs_the_float_graph_under_the_models_name: ("other bits",),
    takes_the_baselines_answers: ("have the float model's answers bit for bit", "other bits"),
}


@pytest.mark.parametrize("fault", FOUND, ids=lambda f: f.__name__)
def test_rows_of_another_model_are_named(
    fault: Fault, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    entry = rows_entry(run)
    assert entry.ok is False
    for words in FOUND[fault]:
        assert any(words in problem for problem in entry.problems), entry.problems


def test_rows_alike_are_no_fault_where_compression_changed_no_value(run: Run) -> None:
    m = run.materials()
    assert engine_rows.computes_otherwise(m)
    m.state = type(m.state)({})
    assert not engine_rows.computes_otherwise(m)
    seen = EngineRows(m, "cpu")
    seen._not_float(alike=True, rows=3, name="")
    assert seen.problems == []


def test_off_the_cpu_only_files_are_compared(classifier_run: Run) -> None:
    seen = EngineRows(classifier_run.materials(), "cuda")
    assert seen.entry().ok is None
    assert "only files are compared" in seen.entry().why
