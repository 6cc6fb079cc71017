"""The code of a stage is part of its key."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import optimizer

SCRIPT = "from optimizer.source_digest import source_digest; print(source_digest('{}'))"


def digest(root: Path, module: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copied(folder: Path) -> Path:
    source = Path(optimizer.__file__).parent
    shutil.copytree(source, folder / "optimizer", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copied(tmp_path)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("unchanged"))


@pytest.fixture(scope="module")
def digest_before(unchanged: Path) -> str:
    return digest(unchanged, "optimizer.validate.stage")


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ("validate/stage.py", True),
        ("harness/tasks/sentence_embedding.py", True),
        ("harness/runtimes/ort/run.py", True),
        ("qtensor.py", True),
        ("cli.py", False),
        ("package/report/page.py", False),
    ],
)
def test_the_digest_of_validate_changes_with_what_it_imports_and_nothing_else(
    copy: Path, digest_before: str, changed: str, counts: bool
) -> None:
    with (copy / "optimizer" / changed).open("a") as f:
        f.write("# changed\n")
    assert (digest(copy, "optimizer.validate.stage") != digest_before) == counts


def test_code_of_others_has_no_digest(copy: Path) -> None:
    assert digest(copy, "json").strip() == ""


METHODS = """
import json
from optimizer.recipe.methods import code
from optimizer.recipe.quantize import Quantize
from optimizer.source_digest import source_digest
names = ("rtn", "gptq", "awq", "rotation")
stage = source_digest("optimizer.compress.stage")
print(json.dumps({n: [stage, code(Quantize(method=n).in_use)] for n in names}))
"""


def codes(root: Path) -> dict[str, object]:
    run = [sys.executable, "-c", METHODS]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def codes_before(unchanged: Path) -> dict[str, object]:
    return codes(unchanged)


@pytest.mark.parametrize(
    ("changed", "redone"),
    [
        ("compress/methods/gptq.py", {"gptq"}),
        ("compress/apply/gptq.py", {"gptq"}),
        ("compress/apply/awq.py", {"awq"}),
        ("compress/methods/awq.py", {"awq"}),
        ("compress/methods/rotation.py", {"rotation"}),
        ("compress/methods/autoround.py", set()),
        ("compress/apply/rounding.py", {"rtn", "gptq", "awq", "rotation"}),
    ],
)
def test_a_changed_method_redoes_the_runs_that_use_it_and_no_others(
    copy: Path, codes_before: dict[str, object], changed: str, redone: set[str]
) -> None:
    with (copy / "optimizer" / changed).open("a") as f:
        f.write("# changed\n")
    after = codes(copy)
    assert {name for name in after if after[name] != codes_before[name]} == redone


def test_a_compiled_module_counts_by_its_bytes() -> None:
    from optimizer.source_digest import source_digest

    assert source_digest("numpy._core._multiarray_umath", own=True)
