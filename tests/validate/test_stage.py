"""report.json of a good run, of a bad one, and of one that cannot run here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.recipe.compression import methods
from optimizer.recipe.recover import Qat
from optimizer.recipe.schema import DataSpec, EvaluationSet, QuantizationAware
from optimizer.store import digest_file
from optimizer.validate.ledger import explain
from optimizer.validate.ledger.inputs import select_inputs
from optimizer.validate.stage import STAGE, check_inputs, clear, make_hops_folder
from optimizer.validate.timing import batch_timing
from tests.conftest import sentences, write_rows
from tests.validate.ledger.faults import mutations as m
from tests.validate.runs import Run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No subprocesses: peak memory is measured in timing/test_batch_timing.py."""
    monkeypatch.setattr(batch_timing, "measure_peak_memory", lambda *_: {})


def changed(run: Run, **validate: Any) -> Run:
    section = run.section
    inner = section.validate_.model_copy(update=validate)
    return replace(run, section=section.model_copy(update={"validate_": inner}))


def report(run: Run, out: Path) -> dict[str, Any]:
    out.mkdir()
    STAGE.run(run.section, run.artifacts, out=out)
    document: dict[str, Any] = json.loads((out / "report.json").read_text())
    return document


@pytest.mark.usefixtures("quick")
def test_a_good_run_passes_every_gate(classifier_run: Run, tmp_path: Path) -> None:
    found = report(changed(classifier_run, max_drop=0.5, min_cosine=0.9), tmp_path / "out")
    assert found["verdict"] == "pass"
    assert [g["name"] for g in found["gates"]] == [
        "ledger",
        "quality.accuracy",
        "quality.min_cosine",
    ]
    assert found["target"] == "onnxruntime-cpu"
    assert found["machine"]["torch_capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["quality"]["examples"] == 64
    assert len(found["modules"]) > 12
    assert found["not_measured"] == {}
    assert (found["ledger"][-1]["hop"], found["ledger"][-1]["ok"]) == ("rows", True)
    assert found["shared_rows"] == {"calibrate": {"validate.data": 0}}
    judged, model = found["judged"], classifier_run.folder("model")
    assert judged["model"] == {p.name: digest_file(p) for p in sorted(model.glob("model.onnx*"))}
    assert judged["answered_by"] == judged["model"]
    assert judged["answers"] == {"rows": 4, "why": ""}
    answers = json.loads((tmp_path / "out" / "answers.json").read_text())["answers"]
    assert {a["label"] for a in answers} <= {"negative", "positive"}
    sense = found["sense"]
    assert set(sense["texts"]) == {"calibrate", "validate.data", "validate.latency.data"}
    assert sense["texts"]["validate.data"]["rows"] == 64
    assert sense["reference"]["verdict"] == "above chance"
    assert sense["reference"]["value"] == found["quality"]["baseline"]["value"] == 0.875
    file = classifier_run.folder("source") / "checkpoint/tokenizer.json"
    assert sense["tokenizer"] == digest_file(file)


def further(folder: Path, seed: int, **options: Any) -> EvaluationSet:
    """64 labelled rows of their own."""
    file = write_rows(folder / f"further{seed}.jsonl", 64, seed)
    columns = {"text": "text", "label": "label"}
    data = DataSpec(source="json", files=(str(file),), columns=columns)
    return EvaluationSet(data=data, **options)


@pytest.mark.usefixtures("quick")
def test_a_further_set_has_gates_of_its_own_and_one_that_is_reported_only_has_none(
    classifier_run: Run, tmp_path: Path
) -> None:
    also = {"judged": further(tmp_path, 5), "seen": further(tmp_path, 6, report_only=True)}
    found = report(
        changed(classifier_run, max_drop=0.5, min_cosine=0.9, also=also), tmp_path / "out"
    )
    assert [g["name"] for g in found["gates"]] == [
        "ledger",
        "quality.accuracy",
        "quality.min_cosine",
        "quality.accuracy.judged",
        "quality.min_cosine.judged",
    ]
    assert {n: s["report_only"] for n, s in found["also"].items()} == {
        "judged": False,
        "seen": True,
    }
    values = [s["cosine"]["mean"] for s in (found["quality"], *found["also"].values())]
    assert len(set(values)) == 3
    assert found["also"]["seen"]["difference"]["interval"] is not None


def test_a_further_set_shares_no_text_with_calibration_or_the_first_set(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    run = runs["static"]
    assert run.section.calibrate is not None
    for data in (run.section.calibrate.data, run.section.validate_.data):
        also = {"same": EvaluationSet(data=data, report_only=True)}
        with pytest.raises(DataError, match="is also in the"):
            STAGE.run(changed(run, also=also).section, run.artifacts, out=tmp_path)


def test_a_model_learns_from_what_a_probe_is_fit_on_but_is_not_calibrated_on_it(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    run = runs["static"]
    write_rows(tmp_path / "train.jsonl", 40, seed=21)
    columns = {"text": "text", "label": "label"}
    train = DataSpec(source="json", files=(str(tmp_path / "train.jsonl"),), columns=columns)
    learns = QuantizationAware(
        qat=Qat(samples=40, held_out=8, batch_size=8), data=train, task="sentence-embedding"
    )
    section = changed(run, train=train).section.model_copy(update={"training": learns})
    check_inputs(section, run.folder("source"))
    assert section.calibrate is not None
    calibrated = section.calibrate.model_copy(update={"data": train})
    with pytest.raises(DataError, match="is also in the"):
        check_inputs(section.model_copy(update={"calibrate": calibrated}), run.folder("source"))


@pytest.mark.usefixtures("quick")
def test_labels_named_in_another_order_than_the_models_do_not_change_the_accuracy(
    classifier_run: Run, tmp_path: Path
) -> None:
    rows = [
        {"text": t, "label": n} for t, n in zip(sentences(64, 2), ["positive"] * 64, strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = classifier_run.section.validate_.data.model_copy(
        update={"files": (str(tmp_path / "rows.jsonl"),)}
    )
    accuracies = []
    for order in (("negative", "positive"), ("positive", "negative")):
        named = changed(
            classifier_run, max_drop=0.5, data=data.model_copy(update={"labels": order})
        )
        found = report(named, tmp_path / order[0])
        accuracies.append(found["quality"]["baseline"]["value"])
    assert accuracies[0] == accuracies[1]


@pytest.mark.usefixtures("quick")
def test_a_damaged_run_fails_and_names_the_hop_but_still_reports(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    run = runs["w8"].copy(tmp_path)
    m.values("model", f"{m.QUERY}.weight_scale", lambda s: 2 * s)(run)
    found = report(run, tmp_path / "out")
    assert found["verdict"] == "fail"
    gate = found["gates"][0]
    assert (gate["name"], gate["verdict"]) == ("ledger", "fail")
    assert "hop lower" in gate["message"]
    assert m.QUERY in gate["message"]
    assert found["quality"] is not None
    told = explain.explain(tmp_path / "out", None)["targets"][0]
    assert (told["finding"]["hop"], told["finding"]["kind"]) == ("lower", "fault")
    assert m.QUERY in [shown["module"] for shown in told["modules"]]
    assert explain.write_command(found, tmp_path).endswith(m.QUERY)


@pytest.mark.usefixtures("quick")
def test_too_few_examples_are_inconclusive_and_the_needed_number_is_reported(
    classifier_run: Run, tmp_path: Path
) -> None:
    found = report(changed(classifier_run, max_drop=0.001), tmp_path / "out")
    assert found["verdict"] == "inconclusive"
    assert found["quality"]["needed"] > 64
    assert str(found["quality"]["needed"]) in found["gates"][1]["message"]


@pytest.mark.usefixtures("quick")
def test_a_deferred_engine_is_judged_on_the_lowered_model_and_not_timed(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    run = runs["w8"].copy(tmp_path)
    why = {"deferred": True, "why": "pip install something", "inspected": None}
    (run.folder("engine") / "engine.json").write_text(json.dumps(why))
    found = report(run, tmp_path / "out")
    assert "pip install something" in found["not_measured"]["speed"]
    assert found["speed"] is None
    assert "lowered model" in found["quality"]["note"]
    assert next(e for e in found["ledger"] if e["hop"] == "engine")["ok"] is None
    assert found["verdict"] == "pass"


def test_overlapping_data_is_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["static"]
    assert run.section.calibrate is not None
    overlap = changed(run, data=run.section.calibrate.data)
    with pytest.raises(DataError, match="calibrate"):
        report(overlap, tmp_path / "out")


def test_the_key_follows_the_rows_of_every_data_set(runs: dict[str, Run]) -> None:
    assert STAGE.files is not None
    section = runs["static"].section
    digests = STAGE.files(section)
    data = {"calibrate", "validate.data", "validate.latency.data"}
    code = {f"code of optimizer.validate.{m}" for m in ("target_runner", "ledger.ledger")}
    code |= set(methods.digest_code(section.quantize.in_use, limits=True))
    assert set(digests) == data | code | {"machine"}
    assert len({digests[name] for name in data}) == 3


def test_ledger_texts_are_of_all_lengths() -> None:
    rows = [Sample("x" * n) for n in range(1, 200)]
    lengths = [len(t) for t in select_inputs(rows)]
    assert lengths[0] == 1
    assert lengths[-1] == 199
    assert lengths == sorted(lengths)
    with pytest.raises(DataError, match="three or more"):
        select_inputs(rows[:2])


@pytest.mark.usefixtures("quick")
def test_swapped_labels_are_refused_by_name(classifier_run: Run, tmp_path: Path) -> None:
    rows = [
        json.loads(line)
        for line in (classifier_run.root / "data/evaluate.jsonl").read_text().splitlines()
    ]
    swapped = [{**r, "label": 1 - r["label"]} for r in rows]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in swapped))
    data = classifier_run.section.validate_.data.model_copy(update={"files": (str(file),)})
    with pytest.raises(DataError, match=r"accuracy is 0.125.*Are the labels swapped\?") as caught:
        report(changed(classifier_run, data=data), tmp_path / "out")
    assert "negative as positive, positive as negative" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_model_that_answers_every_text_alike_is_refused(
    classifier_run: Run, tmp_path: Path
) -> None:
    run = classifier_run.copy(tmp_path)
    file = run.folder("source") / "checkpoint/model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "classifier.weight": 0 * tensors["classifier.weight"]}, file)
    with pytest.raises(DataError, match="64 different inputs one answer"):
        report(run, tmp_path / "out")


def test_texts_that_the_tokenizer_does_not_know_are_refused(
    classifier_run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    # rows with equal numbers of words have equal tokens, so five are left
    rows = [{"text": "東京 " * (1 + i % 5) + chr(0x4E00 + i), "label": i % 2} for i in range(64)]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = classifier_run.section.validate_.data.model_copy(update={"files": (str(file),)})
    with pytest.raises(DataError, match="5 of 5 texts have no token that the tokenizer knows"):
        check_inputs(changed(classifier_run, data=data).section, classifier_run.folder("source"))


def refused_early(run: Run, words: str, **changes: Any) -> None:
    with pytest.raises(DataError, match=words):
        check_inputs(changed(run, **changes).section, run.folder("source"))


def test_labels_of_another_model_are_refused_before_anything_is_compressed(
    classifier_run: Run,
) -> None:
    data = classifier_run.section.validate_.data.model_copy(update={"labels": ("cat", "dog")})
    refused_early(classifier_run, r"the data's labels are \['cat', 'dog'\]", data=data)


def test_ranking_the_numbers_of_a_classifier_is_refused_before_anything_is_compressed(
    classifier_run: Run,
) -> None:
    refused_early(classifier_run, "the model has 2 labels", metric="spearman")


def test_only_hops_that_passed_with_the_same_kernels_outlive_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear(tmp_path)
    (make_hops_folder(tmp_path) / "0-load.json").touch()
    (tmp_path / "report.json").touch()
    clear(tmp_path)
    assert [*tmp_path.rglob("*.json")] == [make_hops_folder(tmp_path) / "0-load.json"]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    clear(tmp_path)
    assert [*tmp_path.iterdir()] == [make_hops_folder(tmp_path)]
    assert [*make_hops_folder(tmp_path).iterdir()] == []
