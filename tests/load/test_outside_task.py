"""A task of another package, with arrays as inputs, in a bundle without our package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optimizer.foundation.errors import RecipeError
from optimizer.harness import tasks
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError
from optimizer.load import outside_task
from optimizer.package import stage
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from tests.harness import small_model
from tests.package.bundles import small_bundle

MODULE = '''\
"""Which of a model's outputs is largest, for inputs that are arrays."""

import json

import numpy as np

from optimizer.harness.inputs.batch import Batch
from optimizer.harness.inputs.kind import Encoded, InputKind
from optimizer.harness.tasks.task import Task


def encode(contract, encoder, inputs, pairs=None, size=None):
    return [Encoded(x, np.asarray(x, np.float32)) for x in inputs]


def collate(contract, encoded, size=None):
    arrays = {contract.inputs[0].name: np.stack([e.encoding for e in encoded])}
    return Batch(arrays, [e.input for e in encoded], ())


def answers(contract, values, batch):
    return [{"largest": int(row.argmax())} for row in values]


TASK = Task(
    name="array-argmax",
    inputs=InputKind("array", encode, collate, parse=json.loads, columns=("array",)),
    output="scores",
    axes=("batch", "width"),
    metrics={"cosine": ()},
    decode=lambda contract, scores, real: scores,
    answers=answers,
    line=lambda answer: str(answer["largest"]),
    arrays=None,
)
'''
INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: toy-task\nVersion: 0\n",
    "entry_points.txt": "[optimizer.tasks]\narray-argmax = toy_task:TASK\n",
}
WEIGHT = np.array([[1, 0, 0], [0, 0, 1], [0, 1, 0]], np.float32)
CONTRACT = small_model.contract(
    "array-argmax",
    version=2,
    input_kind="array",
    inputs=[{"name": "x", "dtype": "float32", "axes": ["batch", 3]}],
    outputs=[{"name": "scores", "dtype": "float32", "axes": ["batch", 3]}],
    tokenizer=None,
)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package toy_task, installed for this test."""
    site = tmp_path / "site"
    (site / "toy_task-0.dist-info").mkdir(parents=True)
    (site / "toy_task.py").write_text(MODULE)
    for name, text in INFO.items():
        (site / "toy_task-0.dist-info" / name).write_text(text)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "toy_task", raising=False)
    return site


def test_one_that_generates_is_named_with_ours(toy: Path) -> None:
    assert tasks.list_generating() == ["text-generation"]
    (toy / "toy_task.py").write_text(MODULE.replace("arrays=None", "sections=('generation',)"))
    sys.modules.pop("toy_task")
    assert tasks.list_generating() == ["text-generation", "array-argmax"]


def test_one_that_cannot_be_loaded_is_left_out_of_a_list(toy: Path) -> None:
    (toy / "toy_task.py").write_text("import no_such_module")
    assert tasks.list_generating() == ["text-generation"]


def asked(folder: Path) -> Recipe:
    small_bundle.recipe(folder)
    (file,) = folder.glob("*.yaml")
    return recipe_file.read(file, ["model.task=array-argmax"])


def bundle(folder: Path) -> Path:
    """scores = x @ WEIGHT, by the real build and package stages."""
    recipe = asked(folder / "recipe")
    steps = small_bundle.steps(folder / "steps", small_bundle.recipe(folder / "recipe"))
    (steps[0] / "contract.json").write_text(json.dumps(CONTRACT))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["scores"])],
        "toy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(WEIGHT, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, steps[2] / "model.onnx")
    small_bundle.judge(recipe, steps)
    out = folder / "package"
    out.mkdir()
    stage.run(recipe.packaging, *small_bundle.inputs(recipe, steps), out=out)
    return out / "bundle"


def test_a_toy_task_is_small() -> None:
    assert 1 + len(INFO) <= 3
    assert sum(len(text.splitlines()) for text in (MODULE, *INFO.values())) <= 60


def test_a_bundle_answers_arrays_with_the_task_of_another_package(
    toy: Path, tmp_path: Path
) -> None:
    with Bundle(bundle(tmp_path)) as opened:
        answers = opened.predict([[5.0, 1, 2], [0, 7, 1], np.array([0, 1, 7])])
    assert [a["largest"] for a in answers] == [0, 2, 1]


def test_the_bundle_answers_where_neither_the_task_nor_the_toolchain_is_installed(
    toy: Path, tmp_path: Path
) -> None:
    folder = bundle(tmp_path)
    script = (
        "import sys\n"
        "sys.modules['optimizer'] = None\n"  # an import of it fails
        "from harness.commands.command_line import main\n"
        "sys.exit(main(['predict', '--json', '[0, 7, 1]']))\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"largest": 2, "engine": "onnxruntime-cpu"}
    assert "tokenizers" not in (folder / "requirements.txt").read_text()


def test_another_module_of_the_task_is_another_key(toy: Path, tmp_path: Path) -> None:
    section = asked(tmp_path / "recipe").packaging
    assert stage.STAGE.files is not None
    before = stage.STAGE.files(section)
    (toy / "toy_task.py").write_text(MODULE + "# changed\n")
    assert stage.STAGE.files(section) != before


def test_a_module_that_imports_what_a_bundle_has_not_is_refused(toy: Path, tmp_path: Path) -> None:
    (toy / "toy_task.py").write_text("import torch\n" + MODULE)
    with pytest.raises(RecipeError, match="imports torch, which a bundle does not have"):
        bundle(tmp_path)


def test_a_task_that_nobody_brings_is_refused_with_those_that_are_known(toy: Path) -> None:
    document: dict[str, Any] = {**CONTRACT, "task": "array-argmin"}
    with pytest.raises(BundleError, match=r"array-argmin.*text-generation, .*array-argmax"):
        tasks.check(Contract.from_json(document))


@pytest.mark.parametrize("name", ["task", "../evil", "__init__", "3d-boxes", "sentence_embedding"])
def test_a_name_that_would_stand_in_the_harness_s_way_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="cannot be the name of a task"):
        outside_task.read_source(name)
