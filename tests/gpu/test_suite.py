"""The GPU suite ends, in time and without a GPU, and says of every part why it did not run."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.plan import (
    PARTS,
    ROOT,
    SECONDS,
    VLLM_ALONE,
    Here,
    Part,
    forbidden,
    limit,
    obstacle,
    reserved,
    twins,
)
from benchmarks.gpu.suite import exit_code, run
from optimizer.harness.runtimes.machine import Gpu, Machine, describe_machine

NAMES = [p.name for p in PARTS]
ADA = Here(Machine("linux", "x86_64", gpu=Gpu("L4", "8.9", "590.1", 23034)))
HOPPER = Here(Machine("linux", "x86_64", gpu=Gpu("H200", "9.0", "590.1", 143771)))
NONE = Here(Machine("linux", "x86_64"))


def suite(out: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "benchmarks.gpu.suite", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, json.loads(out.read_text()), done.stderr


def given(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"rehearse": False, "only": [], "source": {}, **changes})


def part(name: str) -> Part:
    return next(p for p in PARTS if p.name == name)


def test_a_machine_without_a_gpu_is_told_of_every_part_why_it_did_not_run(tmp_path: Path) -> None:
    if describe_machine().gpu is not None:
        pytest.skip("there is a GPU")
    code, document, said = suite(tmp_path / "gpu.json")
    assert code == 0
    assert f"0 ran, 0 failed, {len(PARTS)} not run" in said
    assert list(document["parts"]) == NAMES
    for entry in document["parts"].values():
        assert entry == {"status": "not run", "why": "no GPU was found"}
    assert document["machine"]["cores"] > 0


def test_a_rehearsal_measures_what_runs_on_a_cpu(tmp_path: Path) -> None:
    """Figures of tiny models, which mean nothing: that the code of the parts runs."""
    asked = ("prepare:encoder", "encoder:onnxruntime")
    code, document, _ = suite(
        tmp_path / "gpu.json", "--rehearse", "--seconds", "36000", "--only", *asked
    )
    assert code == 0, document
    assert document["parts"]["prepare:encoder"]["result"]["weights"] == "random: tiny"
    for cell in document["parts"]["encoder:onnxruntime"]["result"]["cells"]:
        assert 0 < cell["end_to_end"]["p50_ms"] <= cell["end_to_end"]["p99_ms"]
        assert cell["texts_per_second"] > 0
    assert document["parts"]["validity"]["why"] == "it was not asked for (--only)"


@pytest.mark.parametrize(("status", "code"), [("ran", 0), ("not run", 0), ("failed", 1)])
def test_a_part_that_failed_is_in_the_exit_code(status: str, code: int) -> None:
    assert exit_code({"parts": {"a": {"status": "ran"}, "b": {"status": status}}}) == code


WORKER = """\
import json, sys, time
job = json.loads(sys.argv[1])
with open(job["answer"], "w") as f:
    json.dump(job["says"], f)
{then}
"""


def answered(tmp_path: Path, says: dict[str, Any], then: str = "", seconds: float = 60) -> Any:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(then=then))
    job = {"answer": str(tmp_path / "answer.json"), "says": says, "rehearse": False}
    return run(job, seconds, [str(worker)])


def test_an_answer_that_failed_is_a_part_that_failed(tmp_path: Path) -> None:
    says = {"status": "failed", "why": "fail: ledger: hop engine", "result": {"verdict": "fail"}}
    entry = answered(tmp_path, says)
    assert {k: entry[k] for k in says} == says


def test_what_a_part_cannot_do_here_is_no_failure(tmp_path: Path) -> None:
    says = {"status": "not run", "why": "the engine was not asked", "result": None}
    assert answered(tmp_path, says) == {"status": "not run", "why": "the engine was not asked"}


@pytest.mark.parametrize(
    ("then", "seconds", "why"),
    [("time.sleep(600)", 2, "time: it did not end within 2 s"), ("1 / 0", 600, "ZeroDivision")],
)
def test_a_part_that_hangs_or_stops_fails_and_its_finished_cells_are_kept(
    tmp_path: Path, then: str, seconds: float, why: str
) -> None:
    cells = {"cells": [{"batch": 1, "end_to_end": {}}, {"batch": 8, "why": "not run: time"}]}
    says = {"status": "running", "why": "", "result": cells}
    entry = answered(tmp_path, says, then, seconds)
    assert entry["status"] == "failed"
    assert why in entry["why"]
    if "Zero" in why:  # on a machine at its limit, 2 s may end before python starts
        assert entry["result"] == cells


DONE = {"first": {"status": "ran"}, "second": {"status": "failed"}}


@pytest.mark.parametrize(
    ("part", "here", "left", "why"),
    [
        (Part("x", 5, 10), ADA, 60, ""),
        (Part("x", 5, 10), NONE, 60, "no GPU"),
        (Part("x", 5, 10), ADA, 4, "time: "),
        (Part("x", 5, 10, ("no_such_module", "json")), ADA, 60, "package: no_such_module cannot"),
        (Part("x", 5, 10, ("no_such.module",)), ADA, 60, "package: "),
        (Part("x", 5, 10, after=("first",)), ADA, 60, ""),
        (Part("x", 5, 10, after=("first", "second")), ADA, 60, "from second, which did not run"),
        (Part("x", 5, 10, recipe="qwen3-4b-int4"), ADA, 60, "the suite is offline"),
        (Part("x", 5, 10, planned=False), ADA, 60, "time: not among the planned"),
        (Part("x", 5, 10, ("json",), ("json",)), replace(ADA, no_cuda={"json": "no"}), 60, "no"),
        (Part("x", 5, 10, ("json",)), replace(ADA, no_cuda={"json": "no"}), 60, ""),
        (Part("x", 5, 10, product="tensorrt-rtx"), ADA, 60, ""),
    ],
)
def test_an_obstacle_is_named(part: Part, here: Here, left: float, why: str) -> None:
    found = obstacle(part, DONE, here, left, given())
    assert bool(found) == bool(why)
    assert why in found


def test_on_a_gpu_that_rtx_makes_no_engines_for_every_rtx_part_says_so() -> None:
    rtx = [p for p in PARTS if "rtx" in p.name or p.name == "validity"]
    for each in rtx:
        assert "makes no engine for compute capability 9.0" in forbidden(each, HOPPER, given())
    others = [p for p in PARTS if p not in rtx]
    assert not any("9.0" in forbidden(p, HOPPER, given()) for p in others)


def test_engines_that_the_runtime_refuses_are_not_run() -> None:
    refused = {"status": "ran", "result": {"validity": "INVALID", "means": ["OLD_DRIVER"]}}
    each = Part("x", 5, 10, product="tensorrt-rtx")
    assert "OLD_DRIVER" in obstacle(each, {"validity": refused}, ADA, 60, given())


def test_one_runtime_a_recipe_unless_another_is_asked_for() -> None:
    each = Part("ledger:minilm-int8:again", 5, 10, recipe="minilm-int8")
    source = given(source={"minilm-int8": str(ROOT)})
    done = {twins(each)[0]: {"status": "failed"}}
    assert "one runtime per recipe" in obstacle(each, done, ADA, 60, source)
    assert not obstacle(each, {twins(each)[0]: {"status": "not run"}}, ADA, 60, source)
    asked = given(source=source.source, only=[each.name])
    assert not obstacle(each, done, ADA, 60, asked)


def test_every_shipped_recipe_has_a_part_for_each_runtime_that_takes_it() -> None:
    recipes = {file.stem: file for file in (ROOT / "recipes").glob("*.yaml")}
    for recipe in recipes.keys() - set(VLLM_ALONE):
        for runtime in ("tensorrt-rtx", "tensorrt", "onnxruntime"):
            assert f"ledger:{recipe}:{runtime}" in NAMES
    for name in VLLM_ALONE:
        assert "type: float8" in recipes[name].read_text("utf-8")


def test_what_must_run_first_does() -> None:
    for i, each in enumerate(PARTS):
        assert set(each.after) <= set(NAMES[:i])
    assert NAMES[0] == "validity"  # it tells whether anything else can run


def test_a_part_may_take_what_it_needs_and_all_that_are_planned_fit_in_the_time() -> None:
    assert all(0 < p.least <= p.most for p in PARTS)
    planned = [p for p in PARTS if p.planned]
    recipes = {p.recipe: p.least for p in planned if p.recipe}
    assert sum(p.least for p in planned if not p.recipe) + sum(recipes.values()) <= SECONDS


def test_a_part_leaves_the_later_ones_their_time() -> None:
    args = given(rehearse=False)
    first, last = part("prepare:encoder"), PARTS[-1]
    kept = reserved(first, ADA, args)
    assert reserved(last, ADA, args) == 0
    assert limit(first, ADA, kept + first.least + 1, args) == first.least + 1
    assert limit(first, ADA, 10_000, args) == first.most
