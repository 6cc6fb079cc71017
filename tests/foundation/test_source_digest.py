"""The code of a stage is part of its key."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import optimizer
from optimizer.foundation import source_digest

CHANGED = {  # {a file: whether the digest of validate changes with it}
    "validate/stage.py": True,
    "harness/tasks/embeddings/sentence_embedding.py": True,
    "harness/runtimes/ort/run.py": True,
    "foundation/qtensor.py": True,
    "cli.py": False,
    "package/report/page.py": False,
}
METHODS = {  # {a file: the methods whose runs are redone}
    "compress/methods/weights/gptq.py": {"gptq"},
    "compress/apply/weights/gptq.py": {"gptq"},
    "compress/apply/activations/awq.py": {"awq"},
    "compress/methods/activations/awq.py": {"awq"},
    "compress/methods/activations/rotation.py": {"rotation"},
    "compress/methods/weights/autoround.py": set(),
    "compress/apply/weights/rounding.py": {"rtn", "gptq", "awq", "rotation"},
}
SCRIPT = """
import json, pathlib, sys
from optimizer.recipe.compression.methods import digest_code
from optimizer.recipe.compression.quantize import Quantize
from optimizer.foundation.source_digest import digest_sources

def digests():
    digest_sources.cache_clear()
    stage = digest_sources("optimizer.compress.stage")
    names = ("rtn", "gptq", "awq", "rotation")
    methods = {n: [stage, digest_code(Quantize(method=n).in_use)] for n in names}
    return {"validate": digest_sources("optimizer.validate.stage"), **methods}

answers = {"": digests()}
for name in sys.argv[1:]:
    file = pathlib.Path("optimizer", name)
    before = file.read_bytes()
    file.write_bytes(before + b"# changed\\n")
    answers[name] = digests()
    file.write_bytes(before)
print(json.dumps({"json": digest_sources("json"), "answers": answers}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Digests of a copy of the package, with each file changed in turn."""
    folder = tmp_path_factory.mktemp("copy")
    source = Path(optimizer.__file__).parent
    shutil.copytree(source, folder / "optimizer", ignore=shutil.ignore_patterns("__pycache__"))
    run = [sys.executable, "-c", SCRIPT, *CHANGED, *METHODS]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("changed", CHANGED)
def test_the_digest_of_validate_changes_with_what_it_imports_and_nothing_else(
    answers: dict[str, Any], changed: str
) -> None:
    before, after = (answers["answers"][name]["validate"] for name in ("", changed))
    assert (after != before) == CHANGED[changed]


def test_code_of_others_has_no_digest(answers: dict[str, Any]) -> None:
    assert answers["json"] == ""


@pytest.mark.parametrize("changed", METHODS)
def test_a_changed_method_redoes_the_runs_that_use_it_and_no_others(
    answers: dict[str, Any], changed: str
) -> None:
    before, after = (answers["answers"][name] for name in ("", changed))
    methods = after.keys() - {"validate"}
    assert {name for name in methods if after[name] != before[name]} == METHODS[changed]


def test_a_compiled_module_counts_by_its_bytes() -> None:
    from optimizer.foundation.source_digest import digest_sources

    assert digest_sources("numpy._core._multiarray_umath", own=True)


EVERYWHERE = """
import a
def f():
    import b
    class C:
        async def g(self):
            async with x:
                import c
            async for y in z:
                import d
            else:
                import e
if x:
    import f
elif y:
    import g
else:
    import h
try:
    import i
except* Error:
    import j
else:
    import k
finally:
    import l
while x:
    import m
else:
    import n
with x:
    import o
match x:
    case 1:
        import p
"""


def test_an_import_counts_in_whatever_block_it_stands(tmp_path: Path) -> None:
    names = source_digest._imports("m", tmp_path / "m.py", EVERYWHERE.encode())
    assert sorted(names) == sorted("abcdefghijklmnop")
