"""A run continues without a target that a stage cannot make, where on_fail allows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer import pipeline
from optimizer.foundation.errors import CheckpointError, LedgerError, MachineError, StoreError
from optimizer.harness.errors import ExplainedError
from optimizer.harness.errors import MachineError as HarnessMachineError
from optimizer.package import stage as package
from optimizer.recipe.schema import Recipe, Section
from optimizer.recipe.stage_sections import FailedTarget
from optimizer.store import MADE_FROM, Stage, Step, Store
from tests.package.bundles import small_bundle

OTHER = "{runtime: tensorrt-rtx, on_missing: defer, float: fp16, on_fail: %s}"


class Faulty(Store):
    """Makes empty folders, but raises `error` for the second target in `stage`."""

    error: ExplainedError
    stage: str

    def step(self, stage: Stage, section: Section | None, *given: Any) -> Step:
        target: Any = getattr(section, "target", section)
        of_the_second = getattr(target, "runtime", "") == "tensorrt-rtx"
        of_the_second |= stage.name == "export" and getattr(section, "float", "") == "fp16"
        if stage.name == self.stage and of_the_second:
            raise self.error
        step = Step(stage.name, f"{len(self.log)}", self.root / f"{len(self.log)}")
        self.log.append({"stage": stage.name, "section": section, "inputs": given})
        if stage.name == "validate":
            step.path.mkdir(parents=True)
            (step.path / MADE_FROM).write_text('{"files": {}}')
            (step.path / "report.json").write_text(json.dumps({"verdict": "pass"}))
        return step


def faulty(folder: Path, stage: str, error: ExplainedError) -> Faulty:
    store = Faulty(folder / "store")
    store.stage, store.error = stage, error
    return store


def asked(folder: Path, rule: str, *first: str) -> Recipe:
    """first: the other target, where it is not one of ONNX Runtime."""
    return small_bundle.recipe(folder / "recipe", (*(first or (small_bundle.ORT,)), OTHER % rule))


ERRORS = {
    "export": LedgerError("another function"),
    "lower": CheckpointError("too wide"),
    "build": HarnessMachineError("it does not compile"),
    "validate": MachineError("not here"),
}


@pytest.mark.parametrize("stage", ERRORS)
def test_the_others_go_on_without_a_target_that_may_be_dropped(tmp_path: Path, stage: str) -> None:
    store = faulty(tmp_path, stage, ERRORS[stage])
    outcome = pipeline.run(asked(tmp_path, "drop"), store)
    assert [b.target.runtime for b in outcome.built] == ["onnxruntime"]
    assert outcome.bundle is not None
    packaged = next(row for row in store.log if row["stage"] == "package")
    assert [b.target.runtime for b in packaged["inputs"][2]] == ["onnxruntime"]
    (said,) = package.list_left_out(packaged["section"])
    assert said == {
        "target": "tensorrt-rtx-cuda", "gate": stage, "message": ERRORS[stage].problem
    }  # fmt: skip


@pytest.mark.parametrize("stage", ERRORS)
def test_a_target_that_may_not_be_dropped_ends_the_run(tmp_path: Path, stage: str) -> None:
    with pytest.raises(type(ERRORS[stage])):
        pipeline.run(asked(tmp_path, "refuse"), faulty(tmp_path, stage, ERRORS[stage]))


def test_the_last_target_is_not_dropped_but_its_error_raised(tmp_path: Path) -> None:
    first = (OTHER % "drop").replace("float: fp16", "float: fp32")
    store = faulty(tmp_path, "lower", MachineError("not here"))
    with pytest.raises(MachineError, match="not here"):
        pipeline.run(asked(tmp_path, "drop", first), store)


def test_a_bundle_without_a_target_that_was_not_made_says_so(tmp_path: Path) -> None:
    recipe = asked(tmp_path, "drop")
    whole = small_bundle.recipe(tmp_path / "one")
    steps = small_bundle.steps(tmp_path / "steps", whole)
    missing = FailedTarget(target=1, stage="export", message="another function")
    section = recipe.packaging.model_copy(update={"left_out": (missing,)})
    out = tmp_path / "out"
    out.mkdir()
    package.run(section, *small_bundle.inputs(recipe, steps), out=out)
    manifest = json.loads((out / "bundle" / "manifest.json").read_text())
    assert [e["target"] for e in manifest["engines"]] == ["onnxruntime-cpu"]
    assert [(d["target"], d["gate"]) for d in manifest["dropped"]] == [
        ("tensorrt-rtx-cuda", "export")
    ]


def test_a_full_disk_drops_no_target(tmp_path: Path) -> None:
    store = faulty(tmp_path, "build", StoreError("no space left on device"))
    with pytest.raises(StoreError):
        pipeline.run(asked(tmp_path, "drop"), store)
