"""Detectors, segmenters and depth models through the ledger: a correct run passes, its bundle
answers as transformers' pipeline does, and each fault is caught."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from optimizer.harness import contract as contracts
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.tasks import find_task
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.harness.tasks.images import image_segmentation
from optimizer.load.config.image_processor import open_processor
from optimizer.validate.ledger import hops, ledger
from optimizer.validate.materials import Materials
from tests.lower.running import session
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.models.test_images import materials
from tests.validate.runs import Run, damaged, make, prove
from tests.vision import TASKS, encoded, picture, recipe

STATIC: dict[str, Any] = {"method": "rtn", "activations": {"range": "minmax"}}
KINDS = ("yolos", "segformer", "depth_anything", "mask2former", "vitpose")
Made = Callable[[str], Run]
CHANGES: dict[str, dict[str, int]] = {  # of a detector's decoder the first layer reads zeros
    "detr": {"encoder_layers": 1},
    "mask2former": {"seed": 2},  # of the first three the one with two labels in each image
    "table-transformer": {"encoder_layers": 1, "decoder_layers": 1},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """made(architecture) -> its run, made at the first call."""

    @cache
    def call(kind: str) -> Run:
        root = tmp_path_factory.mktemp(kind)
        return make(root / "run", recipe(root, kind, STATIC, **CHANGES.get(kind, {})))

    return call


@pytest.fixture(scope="module")
def proven(made: Made) -> Callable[[str], Materials]:
    """proven(architecture) -> materials of its run that hold at every hop."""
    return cache(lambda kind: prove(materials(made(kind))))


@pytest.mark.parametrize("kind", [*KINDS, "detr"])
def test_a_correct_run_passes(proven: Callable[[str], Materials], kind: str) -> None:
    assert proven(kind)


@pytest.mark.parametrize("kind", [*KINDS[:4], "detr", "table-transformer"])
def test_the_float_graph_answers_as_the_pipeline_of_transformers(made: Made, kind: str) -> None:
    from transformers import pipeline

    run = made(kind)
    source = run.root / "source"
    sizes = ((30, 40), (51, 37), (64, 64))
    files = [encoded(picture(*sides, seed=i)) for i, sides in enumerate(sizes)]
    contract = contracts.read(source / "contract.json")
    with closing(OrtRunner(run.folder("graph") / "model.onnx", device="cpu")) as runner:
        queries = [Query(f"image {i}", file) for i, file in enumerate(files)]
        answered = [
            a.answer or {} for a in answer(Predictor(contract, None, runner.infer), queries, 2)
        ]
    theirs = pipeline(
        find_task(TASKS[kind]).pipeline_tag or TASKS[kind],
        str(source / "checkpoint"),
        image_processor=open_processor(source / "checkpoint"),
    )
    for ours, file in zip(answered, files, strict=True):
        options = {"subtask": "semantic"} if kind == "mask2former" else {}
        expected: Any = theirs(Image.open(io.BytesIO(file)), **options)
        COMPARE[TASKS[kind]](ours, expected)


def compare_objects(ours: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    assert expected, "no object tells nothing"
    assert [o["label"] for o in ours["objects"]] == [e["label"] for e in expected]
    scores = [[o["score"] for o in part] for part in (ours["objects"], expected)]
    np.testing.assert_allclose(*scores, rtol=1e-4)
    boxes = [[[*o["box"].values()] for o in part] for part in (ours["objects"], expected)]
    assert np.abs(np.subtract(*boxes)).max() <= 1  # truncated at a whole pixel
    assert [*ours["objects"][0]["box"]] == [*expected[0]["box"]]


def compare_masks(ours: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    ids = np.asarray(Image.open(io.BytesIO(base64.b64decode(ours["map"]))))
    assert [s["label"] for s in ours["segments"]] == [e["label"] for e in expected]
    assert len(expected) > 1
    for segment, one in zip(ours["segments"], expected, strict=True):
        assert ((ids == segment["id"]) == (np.asarray(one["mask"]) > 0)).mean() > 0.999


def compare_depths(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    depths = np.load(io.BytesIO(base64.b64decode(ours["predicted_depth"])))
    right = expected["predicted_depth"].numpy()
    assert np.ptp(right) > 0
    np.testing.assert_allclose(depths, right, atol=1e-4 * np.abs(right).max())
    shades = np.asarray(Image.open(io.BytesIO(base64.b64decode(ours["depth"]))), int)
    assert np.abs(shades - np.asarray(expected["depth"], int)).max() <= 1


COMPARE = {
    "object-detection": compare_objects,
    "image-segmentation": compare_masks,
    "universal-segmentation": compare_masks,
    "depth-estimation": compare_depths,
}


def scaled(name: str, factor: float) -> Callable[[onnx.GraphProto], None]:
    """Multiply the output `name` of a graph by `factor`."""

    def edit(graph: onnx.GraphProto) -> None:
        node = next(n for n in graph.node if name in n.output)
        at = [*node.output].index(name)
        node.output[at] = f"{name}_before"
        value = onnx.numpy_helper.from_array(np.array(factor, np.float32), f"{name}_factor")
        graph.initializer.append(value)
        graph.node.append(onnx.helper.make_node("Mul", [f"{name}_before", value.name], [name]))

    return edit


def test_boxes_are_judged_by_a_limit_of_their_own(
    proven: Callable[[str], Materials], tmp_path: Path
) -> None:
    """A fault of boxes that a distance of all outputs together would hide behind the logits."""
    edit = m.edit_onnx("graph", scaled("pred_boxes", 1.0005))
    entry = ledger.run_hop(hops.export, damaged(proven("yolos"), tmp_path, edit))
    assert entry.ok is False
    assert entry.problems[-1].startswith("pred_boxes: an example is")
    assert set((entry.spread or {})["outputs"]) == {"logits", "pred_boxes"}


def test_another_epsilon_of_a_group_norm_is_named(
    proven: Callable[[str], Materials], tmp_path: Path
) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        norm = next(n for n in graph.node if n.op_type == "GroupNormalization")
        next(a for a in norm.attribute if a.name == "epsilon").f *= 1.5

    entry = ledger.run_hop(
        hops.export, damaged(proven("mask2former"), tmp_path, m.edit_onnx("graph", edit))
    )
    assert entry.ok is False
    assert "epsilon is 1.5e-05, torch's is 1e-05" in entry.problems[0]


def test_a_segmenter_is_quantized_but_where_places_and_masks_are_made(made: Made) -> None:
    state = materials(made("mask2former")).state
    parts = Counter(".".join(m.split(".")[1:3]) for m in state.modules)
    assert parts == {
        "pixel_level_module.encoder": 27,
        "pixel_level_module.decoder": 5,
        "transformer_module.decoder": 6,
    }
    notes = {n.module: n.why for n in state.notes}
    layer = "model.pixel_level_module.decoder.encoder.layers.0.self_attn.sampling_offsets"
    assert notes[layer].endswith("places that attention reads")
    assert not [why for why in notes.values() if why.startswith("not among")]


def test_a_detector_is_quantized_but_where_zeros_or_pixels_enter(made: Made) -> None:
    state = materials(made("detr")).state
    stacks = Counter(m.split(".")[1] for m in state.modules)
    assert stacks == {"backbone": 5, "encoder": 6, "decoder": 19}
    notes = {n.module: n.why for n in state.notes}
    assert notes["model.decoder.layers.0.self_attn.v_proj"] == "it reads zeros"
    assert notes["model.input_projection"].endswith("no integers follow")
    assert {"class_labels_classifier", "bbox_predictor.layers.0"} <= set(notes)


def test_onnx_runtime_convolves_integers_in_a_detector_s_backbone(
    made: Made, tmp_path: Path
) -> None:
    session(made("detr").folder("model") / "model.onnx", optimized=tmp_path / "optimized.onnx")
    kernels = Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)
    # of two layers one has a shortcut; what reads the sum of the last one is float
    assert (kernels["QLinearConv"], kernels["QLinearAdd"], kernels["Conv"]) == (5, 1, 2)


def test_heads_of_a_detector_stay_float(made: Made) -> None:
    state = materials(made("yolos")).state
    notes = {n.module: n.why for n in state.notes}
    both = ("class_labels_classifier", "bbox_predictor")
    heads = [f"{head}.layers.{i}" for head in both for i in range(3)]
    assert all(notes[name].startswith("outside the blocks") for name in heads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_an_answer_is_caught(
    proven: Callable[[str], Materials], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes, masks and depths of the model's size in place of the image's; keypoints of the largest
    values of heatmaps."""
    from optimizer.harness.inputs import image as images
    from optimizer.harness.tasks.images import heatmaps

    clean, original = proven(kind), images.prepare
    monkeypatch.setattr(images, "prepare", lambda s, x: (original(s, x)[0], (s.height, s.width)))
    monkeypatch.setattr(heatmaps, "_newton", lambda logs, places: 0 * places)
    entry = hops.harness(clean)
    assert entry.ok is False
    assert entry.problems


def test_a_processor_whose_sizes_depend_on_the_image_is_refused(tmp_path: Path) -> None:
    from optimizer.foundation.errors import CheckpointError
    from optimizer.load.config import image_processor
    from tests.vision import processor

    processor("yolos", size={"shortest_edge": 32, "longest_edge": 64}).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="sizes depend on the image"):
        image_processor.read_settings(tmp_path, 3)
    file = tmp_path / "preprocessor_config.json"
    document = json.loads(file.read_text()) | {"size": {"height": 32, "width": 64}}
    file.write_text(json.dumps(document))
    made = image_processor.read_settings(tmp_path, 3)
    assert (made.height, made.width, made.crop) == (32, 64, None)


def test_a_label_map_is_that_of_torch() -> None:
    import torch

    logits = np.random.default_rng(0).normal(size=(5, 7, 9)).astype(np.float32)
    for sides in ((7, 9), (70, 33), (3, 4), (131, 1)):
        wide = torch.nn.functional.interpolate(
            torch.from_numpy(logits)[None], sides, mode="bilinear"
        )
        ids = image_segmentation.label_map(logits, sides)
        assert (ids == wide[0].argmax(0).numpy()).mean() > 0.999
