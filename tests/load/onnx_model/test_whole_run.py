"""From an ONNX file to a bundle that answers, in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from optimizer import pipeline
from optimizer.data.datasets import read_samples
from optimizer.foundation import state
from optimizer.harness import tasks
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.inputs import tensors
from optimizer.recipe.schema import Recipe
from optimizer.store import Store
from optimizer.validate.ledger import explain
from optimizer.validate.ledger.inputs import select_inputs
from optimizer.validate.ledger.laws import tensor_laws
from optimizer.validate.ledger.onnx_file import nodes
from optimizer.validate.materials import Materials
from tests.load.onnx_model import exported


def data(file: Path, rows: int, seed: int, task: str) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    if task == "tensors":
        np.savez(file, images=rng.standard_normal((rows, 3, 16, 16)).astype(np.float32))
        return {"source": "npz", "files": (str(file),), "columns": {"arrays": "images"}}
    np.savez(file, pixels=rng.integers(0, 256, (rows, 16, 16, 3), dtype=np.uint8))
    return {"source": "npz", "files": (str(file),), "columns": {"arrays": "*"}}


def recipe_of(file: Path, folder: Path, task: str = "tensors") -> Recipe:
    return Recipe.model_validate(
        {
            "name": "graph",
            "model": {"source": str(file), "task": task},
            "calibrate": {"data": data(folder / "calibrate.npz", 32, 1, task), "samples": 32},
            "quantize": {"method": "rtn", "activations": {"range": "minmax"}},
            "targets": ({"runtime": "onnxruntime", "threads": 1},),
            "validate": {
                "data": data(folder / "evaluate.npz", 80, 2, task),
                "metric": "cosine",
                "max_drop": 0.05,
                "quantization_budget": 0.5,
                "latency": {"iterations": 5, "max_seconds": 0, "must_beat_float": False},
            },
        }
    )


POST = """\
from dataclasses import replace

from optimizer.harness.inputs.tensors import prepare_by
from optimizer.harness.tasks import tensors


def prepare(row):
    return {{"images": (row["pixels"] / 64.0 - 2.0).transpose(2, 0, 1)}}


def answers(contract, values, batch):
    arrays = tensors.split(contract, values)["y"]
    return {}


TASK = replace(
    tensors.TASK, name="{}", answers=answers, tensors=lambda contract: {{}}, line=str,
    inputs=prepare_by(prepare),
)
"""
LARGEST = '[{"largest": int(y.argmax())} for y in arrays]'


def install(site: Path, patch: pytest.MonkeyPatch, name: str, returned: str) -> None:
    """Install a package with a task that answers `returned`, for one test."""
    (site / f"{name}-0.dist-info").mkdir(parents=True)
    (site / f"{name}.py").write_text(POST.format(returned, name))
    info = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"}
    info["entry_points.txt"] = f"[optimizer.tasks]\n{name} = {name}:TASK\n"
    for file, text in info.items():
        (site / f"{name}-0.dist-info" / file).write_text(text)
    patch.syspath_prepend(site)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Store]:
    """(the file, the bundle, the store of its steps)."""
    folder = tmp_path_factory.mktemp("onnx")
    torch.manual_seed(0)
    file = exported.legacy(
        exported.Residual(), exported.images(1), folder / "m.onnx", 17, batch=False
    )
    store = Store(folder / "store")
    outcome = pipeline.run(recipe_of(file, folder), store)
    assert outcome.bundle is not None
    return file, outcome.bundle.path / "bundle", store


def test_the_bundle_answers_nearly_as_the_file(run: tuple[Path, Path, Store]) -> None:
    file, folder, _ = run
    images = np.random.default_rng(9).standard_normal((4, 3, 16, 16)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(file))
    expected = np.concatenate([session.run(None, {"images": x[None]})[0] for x in images])
    with Bundle(folder) as bundle:
        answers = bundle.predict([{"images": x.tolist()} for x in images], batch_size=4)
        assert bundle.predict([images[0]]) == answers[:1]
    found = np.array([a["y"] for a in answers])
    assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


def test_every_convolution_runs_in_integers_between_quantized_outputs(
    run: tuple[Path, Path, Store],
) -> None:
    steps = {step["stage"]: Path(step["path"]) for step in run[2].log}
    compressed = state.read(steps["compress"])
    assert {"graph.wide", "graph.narrow", "graph.fc"} < set(compressed.modules)
    assert {"graph.wide_output", "graph.narrow_output"} < set(compressed.summands)
    assert len(compressed.modules) == 1 + len(compressed.summands) == 4
    engine = json.loads((steps["build"] / "engine.json").read_text())["inspected"]
    assert engine["wider"] == []
    report = json.loads((steps["validate"] / "report.json").read_text())
    assert [e["hop"] for e in report["ledger"] if not e["ok"]] == []
    assert report["ledger"][0]["from"] == "ONNX Runtime on original/model.onnx"


def test_a_wrong_scale_of_one_weight_is_named_by_its_node(
    run: tuple[Path, Path, Store], tmp_path: Path
) -> None:
    file, _, store = run
    steps = {step["stage"]: Path(step["path"]) for step in store.log}
    report = json.loads((steps["validate"] / "report.json").read_text())
    before = {row["node"]: row for row in report["nodes"]["nodes"]}
    assert before["/Relu"]["alone"] == 0 < before["/Relu"]["through"]
    damaged = onnx.load(steps["lower"] / "model.onnx")
    (scale,) = [t for t in damaged.graph.initializer if t.name == "graph.wide.weight_scale"]
    wrong = onnx.numpy_helper.to_array(scale) * np.float32([1, 1, 1.5, 1, 1, 1, 1, 1])
    scale.CopyFrom(onnx.numpy_helper.from_array(wrong, scale.name))
    onnx.save(damaged, tmp_path / "model.onnx")
    recipe = recipe_of(file, tmp_path)
    section = recipe.validation(recipe.targets[0])
    folders = (steps["load"], steps["compress"], steps["export"], tmp_path, steps["build"])
    task = tasks.find_task("tensors")
    inputs = select_inputs(read_samples(section.validate_.data), task)
    report["nodes"] = nodes.measure(Materials(section, *folders, texts=inputs))
    after = {row["node"]: row for row in report["nodes"]["nodes"]}
    moved = [name for name in before if after[name]["alone"] != before[name]["alone"]]
    assert moved == ["/wide/Conv"]
    (tmp_path / "report.json").write_text(json.dumps(report))
    target = explain.explain(tmp_path, "/wide/Conv")["targets"][0]
    assert (target["nodes"]["first"]["node"], target["modules"][0]["module"]) == (
        "/wide/Conv",
        "graph.wide",
    )


def test_an_input_of_another_type_is_caught_at_the_harness(run: tuple[Path, Path, Store]) -> None:
    with Bundle(run[1]) as bundle:
        served, rows = bundle.contract, [tensors.TensorRow({"": np.ones((3, 16, 16), np.int64)})]
    document = served.to_json()
    document["inputs"][0]["dtype"] = "int64"
    other = type(served).from_json(document)
    assert tensor_laws.compare_arrays(Path(), served, served, None, rows) == []
    assert tensor_laws.compare_arrays(Path(), served, other, None, rows)


def test_a_task_of_another_package_makes_the_answers_of_a_file(
    run: tuple[Path, Path, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prepares the rows, too; the ledger says that both are not judged."""
    install(tmp_path / "site", monkeypatch, "largest", LARGEST)
    outcome = pipeline.run(recipe_of(run[0], tmp_path, "largest"), Store(tmp_path / "store"))
    assert outcome.bundle is not None
    pixels = np.random.default_rng(9).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    row = (pixels / 64.0 - 2.0).transpose(2, 0, 1)
    with Bundle(run[1]) as plain, Bundle(outcome.bundle.path / "bundle") as own:
        (answer,) = own.predict([{"pixels": pixels}])
        assert answer == {"largest": int(np.argmax(plain.predict([row])[0]["y"]))}
        with pytest.raises(InputError, match=r"KeyError: 'pixels' \(largest.py:8\)"):
            own.predict([{"image": pixels}])
    hops = json.loads((outcome.built[0].report.path / "report.json").read_text())["ledger"]
    (harness,) = [hop for hop in hops if hop["hop"] == "harness"]
    assert "by code of another package" in harness["unproven"]


@pytest.mark.parametrize(
    ("name", "returned", "problem"),
    [
        ("by_row", LARGEST, ""),
        ("by_batch", '[{"share": float(y[0] / arrays.max())} for y in arrays]', "another answer"),
        ("numpy_value", '[{"largest": y.argmax()} for y in arrays]', "not JSON"),
    ],
)
def test_answers_of_a_task_of_another_package_are_compared_with_each_row_alone(
    run: tuple[Path, Path, Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    returned: str,
    problem: str,
) -> None:
    install(tmp_path, monkeypatch, name, returned)
    pixels = np.random.default_rng(9).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)
    with Bundle(run[1]) as bundle:
        served = type(bundle.contract).from_json(bundle.contract.to_json() | {"task": name})
        rows = [tensors.TensorRow({"pixels": one}) for one in pixels]
        found = tensor_laws.compare_with_alone(served, None, bundle.runner, rows)
    assert bool(found) == bool(problem)
    assert all(problem in sentence for sentence in found)


@pytest.mark.parametrize(
    ("name", "returned", "message"),
    [
        ("wrong_key", 'arrays["boxes"]', "task wrong_key: wrong_key.py:13: IndexError"),
        ("too_few", "[]", "0 answers to 3 rows"),
    ],
)
def test_a_task_of_another_package_that_fails_is_named_with_its_line(
    run: tuple[Path, Path, Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    returned: str,
    message: str,
) -> None:
    install(tmp_path, monkeypatch, name, returned)
    with Bundle(run[1]) as bundle:
        served = type(bundle.contract).from_json(bundle.contract.to_json() | {"task": name})
        rows = [tensors.TensorRow({"pixels": np.full((16, 16, 3), i, np.uint8)}) for i in range(3)]
        with pytest.raises(BundleError, match=message):
            tensor_laws.compare_with_alone(served, None, bundle.runner, rows)
