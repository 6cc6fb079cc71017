"""Parts of the GPU suite that serve over HTTP, on a stand-in for vLLM that answers its paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import models, plan, serving, table
from optimizer.checks import accepted
from optimizer.checks.context import Context
from optimizer.recipe import file as recipe_file

STANDIN = plan.ROOT / "tests" / "standin_vllm"
PATH = os.pathsep.join([str(STANDIN), str(plan.ROOT)])


def decoder_recipe(work: Path) -> Path:
    """The recipe of part prepare:decoder, and what that part says of the weights."""
    (work / "prepared-decoder.json").write_text(json.dumps({"weights": "random: tiny"}))
    folder = work / serving.NAME
    source = models.write_random(serving.NAME, folder / "model", tiny=True)
    return models.write_recipe(serving.NAME, folder, str(source))


def test_vllm_is_started_with_our_folder_and_timed(tmp_path: Path) -> None:
    decoder_recipe(tmp_path)
    answer = tmp_path / "answer.json"
    job = {"part": "vllm:w4a16", "work": str(tmp_path), "answer": str(answer), "seconds": 600}
    command = [sys.executable, "-m", "benchmarks.gpu.parts"]
    subprocess.run(
        [*command, json.dumps({**job, "rehearse": True, "source": None})],
        cwd=plan.ROOT,
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    part = json.loads(answer.read_text())
    assert part["status"] == "ran"
    assert part["result"]["weights"] == "random: tiny"
    assert [c["requests_at_once"] for c in part["result"]["cells"]] == [*serving.TINY_SIZES]
    assert all(c["first_token_ms"]["p50"] >= 20 for c in part["result"]["cells"])


@pytest.mark.parametrize("scheme", serving.SCHEMES)
def test_each_scheme_is_one_that_vllm_takes(tmp_path: Path, scheme: str) -> None:
    path = decoder_recipe(tmp_path)
    changed = [f"quantize={serving.SCHEMES[scheme]}", "targets=[{runtime: vllm}]"]
    accepted.check(recipe_file.read(path, changed), Context())
    assert f"vllm:{scheme}" in [p.name for p in plan.PARTS]


@pytest.mark.slow
def test_a_rehearsal_serves_bundles_of_ours_and_of_vllm(tmp_path: Path) -> None:
    names = ("serve:vllm", "serve:onnxruntime", *(f"vllm:{scheme}" for scheme in serving.SCHEMES))
    command = [sys.executable, "-m", "benchmarks.gpu.suite", "--rehearse", "--seconds", "36000"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "gpu.json"), "--only", *names],
        cwd=plan.ROOT,
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
    )
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0, document
    for name in names:
        assert document["parts"][name]["status"] == "ran"
        assert f"| {name} |" in done.stdout


def test_texts_of_requests_differ() -> None:
    assert len(set(serving.texts(200))) == 200


def test_a_part_runs_with_those_whose_files_it_reads() -> None:
    asked = plan.with_earlier(["serve:vllm", "encoder:tensorrt:float"])
    assert asked == [
        *("prepare:encoder", "build:encoder:tensorrt", "encoder:tensorrt:float"),
        *("prepare:decoder", "serve:vllm"),
    ]


def encoder_cell(sequence: int, **figures: Any) -> dict[str, Any]:
    return {"batch": 1, "sequence": sequence, **figures}


SERVED = {
    "requests_at_once": 8,
    "first_token_ms": {"p50": 3.0},
    "between_tokens_ms": None,
    "tokens_per_second": 9.6,
}


def test_the_tables_have_a_row_for_each_part_with_figures() -> None:
    cells = [encoder_cell(16, end_to_end={"p50_ms": 0.5}), encoder_cell(128, why="not run: time")]
    wrong = [encoder_cell(128, wrong="far")]
    written = table.tables(
        {
            "encoder:a": {"status": "ran", "result": {"cells": cells}},
            "encoder:b": {"status": "failed", "result": {"cells": wrong}},
            "encoder:c": {"status": "not run", "why": "no GPU was found"},
            "serve:vllm": {"status": "ran", "result": {"cells": [SERVED]}},
        }
    )
    assert "| part | 1 x 16 | 1 x 128 |" in written
    assert "| encoder:a | 0.500 |  |" in written
    assert "| encoder:b |  | wrong |" in written
    assert "| serve:vllm | 3.0 / one token only / 10 |" in written
    assert "encoder:c" not in written
    assert "Decoder, texts in a batch" not in written
    assert table.tables({}) == "No part has figures."
