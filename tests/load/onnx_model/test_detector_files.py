"""From a detector's ONNX file and image files to a bundle that answers with boxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from torch import nn

from optimizer import pipeline
from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.harness import tasks
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError
from optimizer.load.onnx_model import stage
from optimizer.recipe.file import read
from optimizer.recipe.schema import Model, Recipe
from optimizer.store import Store
from tests.load.onnx_model import exported

SIZE, LABELS = 16, ("cat", "dog")


class Boxes(nn.Module):
    """Sixteen boxes in pixels of the input, each with the scores of two labels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 4, 4)
        self.head = nn.Conv2d(12, 4 + len(LABELS), 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        fields = self.head(self.stem(images).relu()).flatten(2).sigmoid()
        return torch.cat([fields[:, :4] * SIZE, fields[:, 4:]], 1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("detector")
    module = Boxes()
    nn.init.normal_(module.head.weight[:4], std=0.3)
    nn.init.normal_(module.head.weight[4:], std=1.5)
    inputs = {"images": torch.rand(1, 3, SIZE, SIZE)}
    return exported.legacy(module, inputs, folder / "m.onnx", 17, batch=False)


def draw(folder: Path, name: str, count: int, seed: int) -> dict[str, Any]:
    """Images of blocks of colour, wider than high."""
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    lines = []
    for i in range(count):
        blocks = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8).repeat(6, 0).repeat(6, 1)
        Image.fromarray(blocks).save(folder / f"{name}{i}.png")
        objects = [{"bbox": [6, 6, 12, 12], "category": "dog"}]
        lines.append(json.dumps({"image": str(folder / f"{name}{i}.png"), "objects": objects}))
    table = folder / f"{name}.jsonl"
    table.write_text("\n".join(lines))
    return {
        "source": "json",
        "files": (str(table),),
        "columns": {"image": "image", "objects": "objects"},
    }


@pytest.fixture(scope="module")
def bundle(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    recipe = Recipe.model_validate(
        {
            "name": "boxes",
            "model": {
                "source": str(file),
                "task": "detector",
                "detections": {"labels": LABELS, "threshold": 0.5},
            },
            "calibrate": {"data": draw(folder / "i", "calibrate", 16, 1), "samples": 16},
            "quantize": {"method": "rtn", "activations": {"range": "minmax"}},
            "targets": ({"runtime": "onnxruntime", "threads": 1},),
            "validate": {
                "data": draw(folder / "i", "evaluate", 60, 2),
                "metric": "agreement",
                "max_drop": 0.3,
                "quantization_budget": 0.5,
                "latency": {"iterations": 5, "max_seconds": 0, "must_beat_float": False},
            },
        }
    )
    outcome = pipeline.run(recipe, Store(folder / "store"))
    assert outcome.bundle is not None
    return outcome.bundle.path / "bundle"


def test_the_bundle_finds_the_objects_of_the_file(file: Path, bundle: Path) -> None:
    blocks = np.random.default_rng(9).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    image = blocks.repeat(6, 0).repeat(6, 1)
    session = onnxruntime.InferenceSession(str(file))
    with Bundle(bundle) as opened:
        ours = opened.predict([image])[0]["objects"]
        pixels = tasks.encode(opened.contract, None, [image])["images"]
    (values,) = session.run(None, {"images": pixels})
    best = ours[0]
    at = values[0, 4:].max(0).argmax()
    assert best["score"] == pytest.approx(float(values[0, 4:].max()), abs=0.02)
    assert best["label"] == LABELS[int(values[0, 4:, at].argmax())]


def contract(file: Path, tmp_path: Path, **detections: Any) -> Contract:
    section = Model.model_validate(
        {
            "source": str(file),
            "task": "detector",
            "detections": {"labels": LABELS, **detections},
        }
    )
    stage.check(section, tmp_path)
    return Contract.from_json(json.loads((tmp_path / "contract.json").read_text()))


def test_the_input_s_size_is_that_of_the_file(file: Path, tmp_path: Path) -> None:
    image = contract(file, tmp_path).images
    assert (image.channels, image.height, image.width) == (3, SIZE, SIZE)


def test_labels_that_the_outputs_do_not_have_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"\(6, 16\)"):
        contract(file, tmp_path, labels=(*LABELS, "owl"))


class Fields(nn.Module):
    """Candidates of the same six fields, whatever the image."""

    def __init__(self, fields: list[float]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 4, 4)
        self.head = nn.Parameter(torch.tensor(fields)[:, None])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.stem(images).flatten(2) * 0 + self.head


@pytest.mark.parametrize(
    ("fields", "detections", "message"),
    [
        ([8, 8, 4, 4, -1.5, 2.5], {}, "probabilities from -1.5 to 2.5"),
        ([8, 8, 4, 4, 1, 0.75], {"layout": "final"}, "label ids such as 0.75"),
        ([0.5, 0.5, 0.25, 0.25, 0.5, 0.5], {}, "Set units to share"),
        ([8, 8, 4, 4, 0.5, 0.5], {"units": "share"}, "Set units to pixels"),
    ],
)
def test_outputs_that_cannot_be_what_the_recipe_says_are_refused(
    tmp_path: Path, fields: list[float], detections: Any, message: str
) -> None:
    inputs = {"images": torch.rand(1, 3, SIZE, SIZE)}
    file = exported.legacy(Fields(fields).eval(), inputs, tmp_path / "m.onnx", 17, batch=False)
    with pytest.raises(RecipeError, match=message):
        contract(file, tmp_path, **detections)


def test_logits_are_read_with_an_activation(tmp_path: Path) -> None:
    module = Fields([8, 8, 4, 4, -1.5, 2.5]).eval()
    inputs = {"images": torch.rand(1, 3, SIZE, SIZE)}
    file = exported.legacy(module, inputs, tmp_path / "m.onnx", 17, batch=False)
    assert contract(file, tmp_path, activation="sigmoid").labels == LABELS


def test_a_file_without_an_image_input_is_refused(tmp_path: Path) -> None:
    module = exported.Attention()
    inputs = {"ids": torch.ones(1, 6, dtype=torch.int64), "mask": torch.ones(1, 6)}
    file = exported.legacy(module, inputs, tmp_path / "m.onnx", 17, batch=False)
    with pytest.raises(CheckpointError, match="channels first"):
        contract(file, tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("task: detector", "needs model.detections"),
        ("task: object-detection, detections: {labels: [a]}", "is for task detector"),
        ("task: detector, detections: {labels: [a], layout: pairs}", "layout"),
        ("task: detector, detections: {labels: [a]}, image: {resize: crop}", "resize"),
        ("task: detector, detections: {labels: [a]}, image: {mean: [0], std: [0]}", "std"),
    ],
)
def test_a_recipe_whose_detector_cannot_be_meant_is_refused(
    tmp_path: Path, model: str, message: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: d\nmodel: {{source: m.onnx, {model}}}\nquantize: {{method: rtn}}\n"
        "targets: [{runtime: onnxruntime}]\nvalidate: {metric: map, data: {source: json, "
        "files: [e.jsonl], columns: {image: image, objects: objects}}}\n"
    )
    with pytest.raises(RecipeError, match=message):
        read(recipe)


def test_boxes_before_suppression_in_the_graph_can_be_the_output(
    file: Path, tmp_path: Path
) -> None:
    whole = onnx.load(file)
    (output,) = whole.graph.output
    limits = {"most": np.array([5]), "overlap": np.float32([0.5]), "least": np.float32([0.1])}
    whole.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in limits.items())
    whole.graph.initializer.append(numpy_helper.from_array(np.array([4, 2]), "sizes"))
    node = helper.make_node
    whole.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, [1, 1]))
    whole.graph.node.extend(
        [
            node("Split", [output.name, "sizes"], ["boxes", "scores"], "split", axis=1),
            node("Mul", ["boxes", "scale"], ["scaled"], "scaled"),
            node("Transpose", ["scaled"], ["rows"], perm=[0, 2, 1]),
            node("NonMaxSuppression", ["rows", "scores", *limits], ["kept"], "nms"),
        ]
    )
    inner = output.name
    del whole.graph.output[:]
    whole.graph.output.append(helper.make_tensor_value_info("kept", TensorProto.INT64, [None, 3]))
    onnx.save(whole, tmp_path / "nms.onnx")
    section = {"source": str(tmp_path / "nms.onnx"), "task": "tensors"}
    with pytest.raises(CheckpointError, match="it is int64"):
        stage.run(Model.model_validate(section), make(tmp_path / "refused"))
    loaded = make(tmp_path / "loaded")
    stage.run(Model.model_validate({**section, "outputs": (inner,)}), loaded)
    session = onnxruntime.InferenceSession(loaded / "original" / "model.onnx")
    images = np.random.default_rng(1).random((1, 3, SIZE, SIZE), np.float32)
    expected = onnxruntime.InferenceSession(str(file)).run(None, {"images": images})
    assert np.array_equal(session.run(None, {"images": images})[0], expected[0])
    with pytest.raises(RecipeError, match="a tensor 'boxs'; did you mean"):
        stage.open_file(Model.model_validate({**section, "outputs": ("boxs",)}))


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder
