"""A target that is dropped leaves a bundle of the others, which says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.commands.bundle import look
from optimizer.foundation.verdicts import worst
from optimizer.package import on_fail, stage
from optimizer.package.report.page import render
from optimizer.recipe.schema import TensorRTTarget
from tests.package.bundles import small_bundle

CASES = st.lists(
    st.tuples(
        st.sampled_from(["refuse", "drop"]), st.sampled_from(["pass", "fail", "inconclusive"])
    ),
    min_size=1,
    max_size=4,
)
MESSAGE = "hop lower: encoder.dense: its output is 3.1 times as far off as rounding allows"


def failing(report: Path) -> None:
    document = json.loads(report.read_text())
    gates = [("speed.p99_ms", "inconclusive", "it depends"), ("ledger", "fail", MESSAGE)]
    document["verdict"] = "fail"
    document["gates"] = [{"name": n, "verdict": v, "message": m} for n, v, m in gates]
    report.write_text(json.dumps(document))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a recipe whose second target may be dropped, and failed."""
    folder = tmp_path_factory.mktemp("dropped")
    cuda = "{runtime: tensorrt-rtx, on_missing: defer, on_fail: drop}"
    asked = small_bundle.recipe(folder / "recipe", (small_bundle.ORT, cuda))
    steps = small_bundle.steps(folder / "steps", asked)
    failing(steps[-1] / "report.json")
    out = folder / "out"
    out.mkdir()
    stage.run(asked.packaging, *small_bundle.inputs(asked, steps), out=out)
    return out / "bundle"


@pytest.fixture(scope="module")
def manifest(made: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((made / "manifest.json").read_text())
    return document


def test_the_bundle_holds_nothing_of_the_target_but_its_report(
    made: Path, manifest: dict[str, Any]
) -> None:
    assert [e["target"] for e in manifest["engines"]] == ["onnxruntime-cpu"]
    assert not [n for n in manifest["files"] if "tensorrt" in n and "harness" not in n]
    reports = json.loads((made / "report.json").read_text())
    assert [r["dropped"] for r in reports] == [False, True]


def test_the_manifest_says_which_target_which_gate_and_why(manifest: dict[str, Any]) -> None:
    said = {"target": "tensorrt-rtx-cuda", "gate": "ledger", "message": MESSAGE}
    assert manifest["dropped"] == [said]
    assert manifest["verdict"] == "pass"
    assert manifest["verdicts"] == {"onnxruntime-cpu": "pass"}


def test_inspect_and_the_page_say_it_too(made: Path) -> None:
    assert MESSAGE in look.inspect_text(look.inspect(made))
    page = (made / "report.html").read_text()
    assert "<title>tiny: pass</title>" in page
    assert "Not in the bundle" in page
    assert "Not in the bundle" not in render({"reports": [{"target": "a", "verdict": "fail"}]})


def test_requirements_are_of_the_targets_that_are_there(tmp_path: Path) -> None:
    cuda = "{runtime: onnxruntime, device: cuda, on_missing: defer}"
    asked = small_bundle.recipe(tmp_path, (small_bundle.ORT, cuda), activations=False)
    both, one = (
        stage.write_requirements(t, asked.model.task) for t in (asked.targets, asked.targets[:1])
    )
    assert "onnxruntime-gpu" in both
    assert "onnxruntime-gpu" not in one


@given(CASES)
def test_a_bundle_is_made_when_every_target_in_it_passed(cases: list[tuple[str, str]]) -> None:
    rules, verdicts = [c[0] for c in cases], [c[1] for c in cases]
    kept = on_fail.select_shipped(rules, verdicts)
    left = [v for v, keep in zip(verdicts, kept, strict=True) if keep]
    assert on_fail.judge_targets(rules, verdicts) == worst(left)
    refused = [c for c in cases if c[0] == "refuse" and c[1] != "pass"]
    assert (on_fail.judge_targets(rules, verdicts) == "pass") == (
        "pass" in verdicts and not refused
    )


@given(CASES)
def test_with_refuse_nothing_is_dropped(cases: list[tuple[str, str]]) -> None:
    assert all(on_fail.select_shipped(["refuse"] * len(cases), [c[1] for c in cases]))


def test_when_all_fail_none_is_dropped() -> None:
    assert on_fail.select_shipped(["drop", "drop"], ["fail", "inconclusive"]) == (True, True)
    assert on_fail.judge_targets(["drop", "drop"], ["fail", "inconclusive"]) == "fail"


def test_no_step_before_package_is_redone_for_it() -> None:
    plain, dropped = (TensorRTTarget(runtime="tensorrt-rtx", on_fail=f) for f in ("refuse", "drop"))
    assert plain != dropped
    assert plain.without_on_fail == dropped.without_on_fail == plain
