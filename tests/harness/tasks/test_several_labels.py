"""Multi-label models and regressions with several outputs answer as transformers' pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.data import datasets
from optimizer.data.sample import Sample
from optimizer.foundation.errors import DataError, RecipeError
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.schema import DataSpec
from optimizer.validate.ledger.laws import answer_fields, answer_laws
from optimizer.validate.quality import evaluation, quality
from optimizer.validate.quality.quality import Answers
from tests.conftest import sentences, write_tiny_bert
from tests.harness import small_model
from tests.load.conftest import edit_json
from tests.load.conftest import load as load

TEXTS = sentences(8, seed=3)
TASK = "text-classification"
NAMES = ("toxic", "rude", "kind", "odd")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("several"), labels=NAMES, seed=4)


def answered(out: Path) -> list[dict[str, Any]]:
    contract = contracts.read(out / "contract.json")
    batch = tasks.encode(contract, load_tokenizer(out / "checkpoint", contract), TEXTS)
    with torch.no_grad():
        model = load_torch_model(open_checkpoint(out), TASK)
        logits = model(**{n: torch.from_numpy(a) for n, a in batch.items()}).logits.numpy()
    return tasks.build_answers(contract, tasks.decode(contract, {"logits": logits}, batch), batch)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_the_answers_are_the_pipelines(
    problem: str, load: Any, classifier: Path, tmp_path: Path
) -> None:
    from transformers import pipeline

    folder = Path(shutil.copytree(classifier, tmp_path / "model"))
    edit_json(folder / "config.json", problem_type=problem)
    several = problem != "regression"
    chosen = {"thresholds": {"rude": 0.3}} if several else {}
    got = answered(load(folder, TASK, **chosen))
    judge = pipeline(TASK, model=str(folder), device="cpu")
    options = {"function_to_apply": "sigmoid"} if several else {}
    for text, one in zip(TEXTS, got, strict=True):
        wanted = {x["label"]: x["score"] for x in judge(text, top_k=None, **options)}
        assert one["scores" if several else "values"] == pytest.approx(wanted, abs=1e-5)
        if several:
            above = [n for n in NAMES if wanted[n] >= (0.3 if n == "rude" else 0.5)]
            assert one["labels"] == above
    assert not several or len({tuple(one["labels"]) for one in got}) > 1


def test_thresholds_of_another_model_or_label_are_refused(
    load: Any, classifier: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="problem_type is not set"):
        load(classifier, TASK, thresholds=0.3)
    folder = Path(shutil.copytree(classifier, tmp_path / "model"))
    edit_json(folder / "config.json", problem_type="multi_label_classification")
    with pytest.raises(RecipeError, match=r"'toxi' is not a label.*toxic"):
        load(folder, TASK, thresholds={"toxi": 0.3})


def made(**fields: Any) -> Contract:
    return Contract.from_json(small_model.contract(TASK, labels=[*NAMES], version=3, **fields))


def test_thresholds_stand_in_the_contract_of_a_multi_label_model_only() -> None:
    kept = made(activation="sigmoid", thresholds=[0.1, 0.2, 0.3, 0.4])
    assert Contract.from_json(kept.to_json()) == kept
    assert "thresholds" not in made().to_json()
    with pytest.raises(BundleError, match="a number per label of a multi-label model"):
        made(thresholds=[0.1, 0.2, 0.3, 0.4])
    with pytest.raises(BundleError, match="thresholds"):
        made(activation="sigmoid", thresholds=[0.1, 0.2])


@pytest.mark.parametrize("activation", ["sigmoid", "identity"])
def test_the_ledger_judges_the_fields_by_the_pipeline(
    activation: str, classifier: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(classifier, tmp_path / "model"))
    problem = "regression" if activation == "identity" else "multi_label_classification"
    edit_json(folder / "config.json", problem_type=problem)
    contract = made(activation=activation)
    reference = answer_laws.ReferencePipeline(contract, folder)
    logits = RNG.normal(size=(8, 4)).astype(np.float32) * 5
    for row, found in zip(logits, tasks.build_answers(contract, logits, None), strict=True):  # type: ignore[arg-type]
        wanted = answer_laws.classified(reference, "", row, None)  # type: ignore[arg-type]
        assert list(answer_fields.differ(found, wanted)) == []
        field = found["values" if activation == "identity" else "scores"]
        field["kind"] += 1e-3
        assert list(answer_fields.differ(found, wanted))


def rows_of(tmp_path: Path, name: str, text: str, **spec: Any) -> list[Sample]:
    (tmp_path / name).write_text(text)
    return datasets.read_samples(
        DataSpec(
            source="csv" if name.endswith("csv") else "json",
            files=(str(tmp_path / name),),
            labels=NAMES,
            columns={"text": "text", "labels": "labels"},
            **spec,
        )
    )


def test_rows_have_lists_of_labels_or_texts_with_a_separator(tmp_path: Path) -> None:
    listed = '{"text": "a", "labels": ["rude", "toxic"]}\n{"text": "b", "labels": []}\n'
    assert [r.labels for r in rows_of(tmp_path, "rows.json", listed)] == [(0, 1), ()]
    cells = "text,labels\na,rude | toxic\nb,\nc,odd\n"
    found = rows_of(tmp_path, "rows.csv", cells, label_separator="|")
    assert [r.labels for r in found] == [(0, 1), (), (3,)]


def test_a_row_of_zeros_and_ones_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has a label twice.*names of those with a 1"):
        rows_of(tmp_path, "rows.json", '{"text": "a", "labels": [0, 1, 0, 0]}\n')


def answers(sets: np.ndarray) -> Answers:
    return Answers(tuple(sets.astype(float)), words=tuple(map(np.flatnonzero, sets)))


TRUTH = RNG.random((300, 4)) < (0.5, 0.3, 0.2, 0.1)
GOOD, WORSE = (TRUTH ^ (RNG.random((300, 4)) < share) for share in (0.05, 0.2))
ROWS = [Sample(f"{i}", labels=tuple(map(int, np.flatnonzero(t)))) for i, t in enumerate(TRUTH)]


@pytest.mark.parametrize(("name", "average"), [("f1", "macro"), ("micro_f1", "micro")])
def test_f1_of_sets_equals_scikit_learns(name: str, average: str) -> None:
    judge = pytest.importorskip("sklearn.metrics", reason="scikit-learn judges F1")
    metric = quality.compare(name, ROWS, answers(GOOD), answers(WORSE))
    weights = np.vstack([np.ones(300), RNG.integers(0, 3, 300)]).astype(float)
    for system, predicted in ((metric.baseline, GOOD), (metric.candidate, WORSE)):
        for row, found in zip(weights, system(weights), strict=True):
            drawn = np.repeat(np.arange(300), row.astype(int))
            assert found == pytest.approx(
                judge.f1_score(TRUTH[drawn], predicted[drawn], average=average)
            )


def test_the_paired_test_of_sets_tells_a_loss_from_none() -> None:
    for candidate, verdict in ((GOOD, "pass"), (WORSE, "fail")):
        metric = quality.compare("f1", ROWS, answers(GOOD), answers(candidate))
        assert quality.judge("f1", metric, 300, 0.05, 0.95, None)[0].verdict == verdict


def test_spearman_of_several_outputs_is_the_mean_of_theirs() -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy judges the rank correlation")
    truth = RNG.normal(size=(60, 3))
    values = truth + RNG.normal(size=(60, 3))
    rows = [Sample(f"{i}", scores=tuple(t)) for i, t in enumerate(truth)]
    metric = quality.compare("spearman", rows, Answers(tuple(values)), Answers(tuple(truth)))
    each = [stats.spearmanr(values[:, i], truth[:, i]).statistic for i in range(3)]
    assert metric.baseline(np.ones((1, 60)))[0] == pytest.approx(np.mean(each))
    with pytest.raises(DataError, match="rows have 3 scores, and the model answers with 2"):
        quality.compare("spearman", rows, *[Answers(tuple(values[:, :2]))] * 2)


def test_a_metric_of_one_label_does_not_judge_several(tmp_path: Path) -> None:
    rows = {"validate.data": rows_of(tmp_path, "r.json", '{"text": "a", "labels": [0]}\n')}
    spec = DataSpec(source="json", files=(str(tmp_path / "r.json"),), labels=NAMES)
    settings: Any = SimpleNamespace(metric="f1", data=spec, also={}, train=None)
    evaluation.check(settings, rows, made(activation="sigmoid"))
    with pytest.raises(DataError, match="gives a text one label"):
        evaluation.check(settings, rows, made())
