"""A vision encoder through the ledger: a correct run passes, and each fault in the preprocessing
is caught at its hop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.image_settings import ImageSettings
from optimizer.harness.inputs import image as images
from optimizer.recipe.schema import TensorRTTarget
from optimizer.validate.ledger import hops
from optimizer.validate.ledger.laws import contract_laws
from optimizer.validate.materials import Materials
from tests.harness import small_model
from tests.validate.ledger.faults import mutations as m
from tests.validate.runs import (
    FOLDERS,
    Run,
    first_refused,
    for_target,
    lowered_again,
    make,
    prove,
)
from tests.vision import encoded, picture, recipe

PHOTOGRAPHS = [encoded(picture(30 + i % 7, 40, seed=i)) for i in range(12)]


SMOOTH = {"method": "smoothquant", "activations": {"range": "minmax"}, "bias_correction": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("vit_run")
    return make(root / "run", recipe(root, "vit", SMOOTH))


def materials(run: Run, bundle: Path | None = None) -> Materials:
    folders = (run.root / f for f in FOLDERS)
    return Materials(run.section, *folders, texts=PHOTOGRAPHS, bundle=bundle)


def refused(entries: list[Any]) -> list[str]:
    return [f"{e.hop}: {e.problems}" for e in entries if e.ok is False]


@pytest.fixture(scope="module")
def proven(run: Run) -> Materials:
    return prove(materials(run))


def test_a_correct_run_passes_in_both_dialects(proven: Materials, run: Run, tmp_path: Path) -> None:
    target = TensorRTTarget(runtime="tensorrt-rtx", float="fp32")
    other = lowered_again(proven, for_target(run, tmp_path / "rtx", target))
    prove(other, "lower")


def queries_are_keys(graph: onnx.GraphProto) -> None:
    node = next(n for n in graph.node if n.op_type == "MultiHeadAttention")
    node.input[0] = node.input[1]


def scaled_by_less(graph: onnx.GraphProto) -> None:
    node = next(n for n in graph.node if n.op_type == "MultiHeadAttention")
    (scale,) = (a for a in node.attribute if a.name == "scale")
    scale.f *= 0.9


def one_head(graph: onnx.GraphProto) -> None:
    node = next(n for n in graph.node if n.op_type == "MultiHeadAttention")
    (heads,) = (a for a in node.attribute if a.name == "num_heads")
    heads.i = 1


@pytest.mark.parametrize("fault", [queries_are_keys, scaled_by_less, one_head])
def test_a_fault_of_an_attention_in_one_operator_is_caught_where_it_is_lowered(
    proven: Materials, tmp_path: Path, fault: Callable[[onnx.GraphProto], None]
) -> None:
    assert first_refused(proven, tmp_path, m.edit_onnx("model", fault)) == "lower"


def test_what_stays_float_is_said_with_the_reason(run: Run) -> None:
    state = materials(run).state
    notes = {n.module: n.why for n in state.notes}
    assert notes["vit.embeddings.patch_embeddings.projection"].startswith("outside the blocks")
    assert "classifier" in notes
    assert len(state.weights) == 12


@pytest.fixture
def served(run: Run, tmp_path: Path) -> Callable[..., list[str]]:
    """served(edit of the contract) -> problems of the harness hop."""

    def problems(edit: Callable[[dict[str, Any]], None] | None = None) -> list[str]:
        document = json.loads((run.root / "source" / "contract.json").read_text())
        if edit is not None:
            edit(document)
        (tmp_path / "contract.json").write_text(json.dumps(document))
        entry = hops.harness(materials(run, tmp_path))
        assert entry.ok == (not entry.problems)
        return list(entry.problems)

    return problems


def test_the_harness_is_transformers_processor(served: Callable[..., list[str]]) -> None:
    assert served() == []


def of(section: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document[section].update(changes)


def shifted(document: dict[str, Any]) -> None:
    document["labels"] = [*document["labels"][1:], document["labels"][0]]


IN_THE_CONTRACT = {
    "mean and std swapped": of("image", mean=[0.2, 0.25, 0.3], std=[0.4, 0.5, 0.6]),
    "the mean of other channels": of("image", mean=[0.6, 0.5, 0.4]),
    "not normalized": of("image", mean=None, std=None),
    "not rescaled": of("image", rescale=None),
    "another filter": of("image", resample="bicubic"),
    "cropped and not resized": of("image", resize=None, crop=[32, 32]),
    "classes shifted by one": shifted,
}


@pytest.mark.parametrize("edit", IN_THE_CONTRACT.values(), ids=IN_THE_CONTRACT.keys())
def test_a_fault_of_the_contract_is_caught_by_its_arrays_or_answers(
    served: Callable[..., list[str]], edit: Callable[[dict[str, Any]], None]
) -> None:
    problems = served(edit)
    assert any(
        "is answered" in p or "pixel_values" in p or p.startswith("labels") for p in problems
    )
    assert any("the source's is" in p for p in problems)  # and by its fields


def exchanged(source: Any, channels: int) -> Any:
    return Image.fromarray(np.asarray(PIXELS(source, channels))[..., ::-1].copy())


def coarse(settings: ImageSettings, source: Any) -> Any:
    """Mix the four nearest pixels, however much the image shrinks: no antialiasing."""
    opened = PIXELS(source, settings.channels)
    size, (width, height) = (settings.width, settings.height), opened.size
    matrix = (width / size[0], 0, 0, 0, height / size[1], 0)
    mixed = opened.transform(size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return np.asarray(mixed), (height, width)


def moved(settings: ImageSettings, source: Any) -> Any:
    pixels, sides = PREPARED(settings, source)
    return np.roll(pixels, 1, axis=1), sides


def channels_last(contract: Any, encoded: Any, size: Any = None) -> Any:
    batch = COLLATE(contract, encoded, size)
    array = batch["pixel_values"]
    batch["pixel_values"] = array.transpose(0, 2, 3, 1).reshape(array.shape)
    return batch


PIXELS, PREPARED, COLLATE = images.load_image, images.prepare, images.collate
IN_THE_CODE: dict[str, tuple[str, Any]] = {
    "red and blue exchanged": ("load_image", exchanged),
    "no antialiasing": ("prepare", coarse),
    "moved by a pixel": ("prepare", moved),
}


@pytest.mark.parametrize(("name", "fault"), IN_THE_CODE.values(), ids=IN_THE_CODE.keys())
def test_a_fault_of_the_code_is_caught(
    served: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, name: str, fault: Any
) -> None:
    monkeypatch.setattr(images, name, fault)
    assert any("pixel_values of image" in p for p in served())


def test_channels_last_are_caught(
    served: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tasks.TASKS["image-classification"]
    wrong = replace(task, inputs=replace(task.inputs, collate=channels_last))
    monkeypatch.setitem(tasks.TASKS, task.name, wrong)
    assert any("pixel_values of image" in p for p in served())


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_vector_of_an_image_is_within_its_bound(pooling: str) -> None:
    document = small_model.contract("image-feature-extraction", pooling=pooling)
    made = Contract.from_json(document)
    hidden = np.random.default_rng(0).standard_normal((3, 17, small_model.WIDTH))
    outputs = {"last_hidden_state": hidden.astype(np.float32)}
    batch = tasks.encode(made, None, PHOTOGRAPHS[:3])
    expected, bound = contract_laws.evaluate(made, outputs, batch)
    assert (np.abs(tasks.decode(made, outputs, batch) - expected) <= bound).all()
