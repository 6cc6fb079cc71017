"""Models that a browser would answer differently are refused before the build."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import optimizer
from optimizer.checks import accepted
from optimizer.checks.context import Context
from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.harness import tasks
from optimizer.lower.web.accepted import check_tokenizer
from optimizer.recipe import file as recipe_file
from tests.conftest import write_tiny_recipe
from tests.harness import small_model


def check(folder: Path, task: str) -> None:
    file = write_tiny_recipe(folder, folder / "model", task)
    head, tail = file.read_text().split("targets:\n", 1)
    tail = tail[tail.index("validate:") :].replace("probe_accuracy", "cosine")
    file.write_text(f"{head}targets:\n  - {{runtime: onnxruntime-web}}\n{tail}")
    accepted.check(recipe_file.read(file), Context())


def test_the_tasks_that_the_page_answers_are_taken(tmp_path: Path) -> None:
    check(tmp_path, "sentence-embedding")
    check(tmp_path, "feature-extraction")


def test_a_task_that_it_does_not_answer_is_refused_with_why(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"targets\.0\.runtime: token-classification .* places"):
        check(tmp_path, "token-classification")


def test_a_tokenizer_of_parts_that_it_has_is_taken(tmp_path: Path) -> None:
    check_tokenizer(small_model.tokenizer(tmp_path))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Nmt"}]}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
        ("pre_tokenizer", {"type": "UnicodeScripts"}),
        ("model", {"type": "WordLevel", "vocab": {}, "unk_token": "[UNK]"}),
    ],
)
def test_a_part_that_it_lacks_is_named(tmp_path: Path, part: str, value: dict[str, object]) -> None:
    path = small_model.tokenizer(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    inner = value["normalizers"][0]["type"] if "normalizers" in value else value["type"]  # type: ignore[index]
    with pytest.raises(CheckpointError, match=f"{part}: {inner} is not in the tokenizer"):
        check_tokenizer(path)


def test_the_page_has_code_for_the_tasks_that_it_is_said_to_answer() -> None:
    page = (Path(optimizer.__file__).parent / "package/web/tasks.mjs").read_text()
    answered = set(re.findall(r'^  "([a-z-]+)": ', page, re.M))
    assert answered == {n for n, task in tasks.TASKS.items() if not task.not_in_browser}
