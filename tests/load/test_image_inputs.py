"""Models of images: loaded with their processor, exported, and answering photographs."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from optimizer.export import stage as export
from optimizer.foundation.errors import CheckpointError
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.load.config import image_processor
from optimizer.recipe.schema import Export
from tests.load.conftest import Load
from tests.vision import LABELS, SIDE, encoded, picture, processor, write

CLASSIFY, FEATURES = "image-classification", "image-feature-extraction"


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("vit"))


@pytest.mark.parametrize(
    "kind", ["vit", "deit", "dinov2", "dinov2_with_registers", "resnet", "convnext", "swin"]
)
def test_a_model_is_loaded_with_its_processor_and_labels(
    load: Load, tmp_path: Path, kind: str
) -> None:
    folder = load(write(tmp_path / kind, kind), CLASSIFY)
    made = contracts.read(folder / "contract.json")
    assert made.labels == LABELS
    assert made.inputs[0].axes == ("batch", 3, SIDE, SIDE)
    assert made.outputs[0].axes == ("batch", len(LABELS))
    assert made.images.resize == (
        {"shortest_edge": 36} if kind in ("resnet", "convnext") else {"height": SIDE, "width": SIDE}
    )


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_its_graph_answers_photographs_as_transformers_does(
    load: Load, tmp_path: Path, kind: str
) -> None:
    from transformers import AutoModelForImageClassification

    source = write(tmp_path / kind, kind)
    folder, out = load(source, CLASSIFY), tmp_path / "export"
    out.mkdir()
    export.run(Export(), folder, out=out)
    made = contracts.read(folder / "contract.json")
    images = [encoded(picture(40 + i, 60, seed=i), "JPEG") for i in range(3)]
    with OrtRunner(out / "model.onnx", device="cpu") as runner:
        predictor = Predictor(made, None, runner.infer)
        queries = [Query(f"image {i}", image) for i, image in enumerate([*images, b"none"])]
        *answers, refused = answer(predictor, queries, batch_size=2)
    assert refused.error is not None
    assert "its format is not supported" in refused.error.problem
    with torch.no_grad():
        theirs = AutoModelForImageClassification.from_pretrained(source).eval()
        photographs = [Image.open(io.BytesIO(i)) for i in images]
        pixels = image_processor.open_processor(source)(photographs, return_tensors="pt")
        expected = theirs(**pixels).logits.softmax(-1).numpy()
    ours = [[(a.answer or {})["scores"][label] for label in LABELS] for a in answers]
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_features_are_the_class_token_unless_the_recipe_says_mean(load: Load, vit: Path) -> None:
    made = contracts.read(load(vit, FEATURES, ignore_tensors=("classifier.*",)) / "contract.json")
    assert made.pooling == "cls"
    assert made.outputs[0].axes == ("batch", 17, 32)
    hidden = np.arange(2 * 17 * 32, dtype=np.float32).reshape(2, 17, 32)
    batch = {"pixel_values": np.zeros((2, 3, SIDE, SIDE), np.float32)}
    values = tasks.decode(made, {"last_hidden_state": hidden}, batch)
    np.testing.assert_array_equal(values, hidden[:, 0])
    section = {"pooling": "mean", "ignore_tensors": ("classifier.*",)}
    mean = contracts.read(load(vit, FEATURES, **section) / "contract.json")
    values = tasks.decode(mean, {"last_hidden_state": hidden}, batch)
    np.testing.assert_allclose(values, hidden.mean(1))


def changed(source: Path, folder: Path, **settings: Any) -> Path:
    copy = Path(shutil.copytree(source, folder))
    file = copy / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return copy


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"do_pad": True, "pad_size": {"height": 40, "width": 40}}, "do_pad"),
        ({"size": {"shortest_edge": 32}}, "sizes would differ"),
        ({"size": {"longest_edge": 32}}, "longest_edge"),
        ({"size": {"height": 64, "width": 64}}, "the model does not take them"),
        ({"image_mean": [0.5]}, "image.mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image.std"),
        ({"image_processor_type": "PixtralImageProcessor"}, "steps of its own"),
    ],
)
def test_a_processor_that_does_something_else_is_refused(
    load: Load, vit: Path, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(CheckpointError, match=why):
        load(changed(vit, tmp_path / "copy", **settings), CLASSIFY)


def test_a_model_without_a_processor_is_refused(load: Load, vit: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(vit, tmp_path / "copy"))
    (copy / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match="no image processor"):
        load(copy, CLASSIFY)


@pytest.mark.parametrize("name", ["ViTFeatureExtractor", "ViTImageProcessorFast"])
def test_older_and_fast_names_mean_the_same_processor(
    load: Load, vit: Path, tmp_path: Path, name: str
) -> None:
    key = "feature_extractor_type" if name.endswith("Extractor") else "image_processor_type"
    copy = changed(vit, tmp_path / "copy", **{key: name})
    ours = contracts.read(load(copy, CLASSIFY) / "contract.json").images
    assert ours == contracts.read(load(vit, CLASSIFY) / "contract.json").images


def test_texts_of_an_image_model_and_images_of_a_text_model_are_refused(
    load: Load, vit: Path, tiny_bert: Path
) -> None:
    with pytest.raises(CheckpointError, match="another kind than text models"):
        load(vit, "feature-extraction")
    with pytest.raises(CheckpointError, match="another kind than image models"):
        load(tiny_bert, FEATURES)


def test_maps_of_features_are_refused(load: Load, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\[batch, positions, width\]"):
        load(write(tmp_path / "resnet", "resnet"), FEATURES)


def test_a_processor_of_efficientnet_divides_twice(tmp_path: Path) -> None:
    processor("efficientnet", size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    assert image_processor.read_settings(tmp_path, 3).divide == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("siglip2", "lists of patches")],
)
def test_an_architecture_of_images_that_is_not_covered_is_refused_in_a_sentence(
    load: Load, tmp_path: Path, kind: str, why: str
) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(CheckpointError, match=f"'{kind}' is not covered.*{why}"):
        load(tmp_path, FEATURES)
