"""The GPU suite ends, in time and without a GPU, and says of every part why it did not run."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_suite import PARTS, ROOT, Part, obstacle
from optimizer.harness.machine import this_machine

NAMES = [p.name for p in PARTS]


def suite(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "benchmarks/gpu_suite.py", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    return done.returncode, json.loads(out.read_text())


def test_a_machine_without_a_gpu_is_told_of_every_part_why_it_did_not_run(tmp_path: Path) -> None:
    if this_machine().gpu is not None:
        pytest.skip("there is a GPU")
    code, document = suite(tmp_path / "gpu.json")
    assert code == 0
    assert list(document["parts"]) == NAMES
    for part in document["parts"].values():
        assert part == {"status": "not run", "why": "no GPU was found"}
    assert document["machine"]["cores"] > 0


def test_what_does_not_fit_in_the_time_says_so(tmp_path: Path) -> None:
    _, document = suite(tmp_path / "gpu.json", "--rehearse", "--seconds", "3")
    assert document["parts"]["prepare:encoder"]["why"].startswith("time: it takes 20 s or more")
    assert all(part["why"] for part in document["parts"].values())
    assert document["seconds"] < 30


def test_a_rehearsal_measures_what_runs_on_a_cpu(tmp_path: Path) -> None:
    """Figures of tiny models, which mean nothing: that the code of the parts runs."""
    asked = ("prepare:encoder", "encoder:torch-eager", "encoder:onnxruntime")
    code, document = suite(
        tmp_path / "gpu.json", "--rehearse", "--seconds", "900", "--only", *asked
    )
    assert code == 0, document
    for name in asked[1:]:
        for cell in document["parts"][name]["result"]["float"]["cells"]:
            assert 0 < cell["end_to_end"]["p50_ms"] <= cell["end_to_end"]["p99_ms"]
            assert cell["texts_per_second"] > 0
    assert document["parts"]["validity"]["why"] == "it was not asked for (--only)"


def given(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"rehearse": False, "only": [], "source": {}, **changes})


DONE = {"first": {"status": "ran"}, "second": {"status": "failed"}}


@pytest.mark.parametrize(
    ("part", "gpu", "left", "why"),
    [
        (Part("x", 5, 10), True, 60, ""),
        (Part("x", 5, 10), False, 60, "no GPU"),
        (Part("x", 5, 10), True, 4, "time: "),
        (Part("x", 5, 10, ("no_such_module", "json")), True, 60, "package: no_such_module cannot"),
        (Part("x", 5, 10, ("no_such.module",)), True, 60, "package: "),
        (Part("x", 5, 10, after=("first",)), True, 60, ""),
        (Part("x", 5, 10, after=("first", "second")), True, 60, "from second, which did not run"),
        (Part("x", 5, 10, recipe="qwen3-4b-int4"), True, 60, "there is no network"),
    ],
)
def test_an_obstacle_is_named(part: Part, gpu: bool, left: float, why: str) -> None:
    found = obstacle(part, DONE, gpu, left, given())
    assert bool(found) == bool(why)
    assert why in found


def test_every_shipped_recipe_has_a_part_for_each_runtime() -> None:
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        for runtime in ("tensorrt-rtx", "tensorrt", "onnxruntime"):
            assert f"ledger:{recipe.stem}:{runtime}" in NAMES


def test_what_must_run_first_does() -> None:
    for i, part in enumerate(PARTS):
        assert set(part.after) <= set(NAMES[:i])
    assert NAMES[0] == "validity"  # it tells whether anything else can run
