"""Detectors of ONNX files: boxes in the image as given, whatever form the outputs have."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError
from optimizer.harness.inputs.batch import Batch
from optimizer.harness.tasks.images import detector
from optimizer.validate.ledger.laws.answer_fields import differ
from optimizer.validate.ledger.laws.images import detector_laws, prepared_pixels

LABELS = ["cat", "dog", "owl"]
SIDES = (60, 100)  # height and width of the image that the boxes lie in


def contract(outputs: dict[str, list[int]], image: Any = (), detections: Any = ()) -> Contract:
    letterbox = {"fill": 114, "place": "centre"}
    document = {
        "version": 3,
        "task": "detector",
        "input_kind": "image",
        "inputs": [{"name": "x", "dtype": "float32", "axes": ["batch", 3, 64, 96]}],
        "outputs": [
            {"name": n, "dtype": "float32", "axes": ["batch", *a]} for n, a in outputs.items()
        ],
        "labels": LABELS,
        "image": {
            "channels": 3,
            "height": 64,
            "width": 96,
            "resample": "linear",
            "crop": None,
            "resize": {"height": 64, "width": 96},
            "rescale": 1 / 255,
            "offset": 0.0,
            "mean": None,
            "std": None,
            "divide": None,
            "letterbox": letterbox,
            **dict(image),
        },
        "detections": {
            "layout": "scores",
            "box": "cxcywh",
            "units": "pixels",
            "activation": "none",
            "nms": 0.5,
            "threshold": 0.25,
            "most": 60,
            **dict(detections),
        },
    }
    made = Contract.from_json(document)
    tasks.check(made)
    return made


def draw(candidates: int, seed: int) -> np.ndarray:
    """Candidates (candidates, 4 + labels): crowded boxes in pixels, scores of which a third are
    above the threshold."""
    rng = np.random.default_rng(seed)
    boxes = np.concatenate(
        [rng.uniform(20, 44, (candidates, 2)), rng.uniform(8, 30, (candidates, 2))], 1
    )
    scores = rng.uniform(0, 0.7, (candidates, len(LABELS))) ** 2
    return np.concatenate([boxes, scores], 1).astype(np.float32)


def answer(made: Contract, values: np.ndarray, sides: tuple[int, int] = SIDES) -> dict[str, Any]:
    batch = Batch({"x": np.zeros((1, 1))}, [None], [None], sides=[sides])
    (one,) = tasks.build_answers(made, values.reshape(1, -1).astype(np.float32), batch)
    return one


@pytest.mark.parametrize("outputs", [{"o": [7, 40]}, {"o": [40, 7]}, {"b": [40, 4], "s": [40, 3]}])
def test_fields_are_found_in_either_order_and_in_several_outputs(
    outputs: dict[str, list[int]],
) -> None:
    fields = draw(40, 1)
    expected = answer(contract({"o": [40, 7]}), fields)
    parts = [fields.T] if outputs.get("o") == [7, 40] else [fields]
    parts = [fields[:, :4], fields[:, 4:]] if "b" in outputs else parts
    values = np.concatenate([p.ravel() for p in parts])
    assert answer(contract(outputs), values) == expected
    assert expected["objects"]


def test_outputs_without_the_fields_are_refused_with_their_shapes() -> None:
    with pytest.raises(BundleError, match=r"\(9, 40\)"):
        contract({"o": [9, 40]})


def test_outputs_of_which_the_boxes_are_not_first_are_refused() -> None:
    with pytest.raises(BundleError, match="boxes first"):
        contract({"scores": [40, 3], "boxes": [40, 4]})


@pytest.mark.parametrize("place", ["centre", "corner", None])
@pytest.mark.parametrize("sides", [(60, 100), (200, 90), (64, 96)])
def test_a_box_around_a_drawn_rectangle_comes_back_to_it(
    place: str | None, sides: tuple[int, int]
) -> None:
    pixels = np.zeros((*sides, 3), np.uint8)
    top, left, bottom, right = sides[0] // 4, sides[1] // 4, sides[0] // 2, sides[1] * 3 // 4
    pixels[top:bottom, left:right] = 255
    frame = None if place is None else {"fill": 0, "place": place}
    made = contract({"o": [1, 7]}, {"letterbox": frame})
    seen = tasks.encode(made, None, [pixels])["x"][0, 0] > 0.5
    rows, columns = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
    low, high = np.array([columns[0], rows[0]]), np.array([columns[-1] + 1, rows[-1] + 1])
    values = np.array([*((low + high) / 2), *(high - low), 0.9, 0, 0])
    (found,) = answer(made, values, sides)["objects"]
    assert list(found["box"].values()) == pytest.approx([left, top, right, bottom], abs=3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "detections",
    [
        {},
        {"nms": None},
        {"box": "xyxy"},
        {"box": "xywh", "units": "share"},
        {"activation": "sigmoid", "threshold": 0.53},
    ],
)
def test_answers_are_those_of_the_outputs_read_in_float64(detections: Any, seed: int) -> None:
    made = contract({"o": [50, 7]}, (), detections)
    fields = draw(50, seed)
    if made.candidates.units == "share":
        fields[:, :4] /= [96, 64, 96, 64]
    if made.candidates.box == "xyxy":
        fields[:, 2:4] += fields[:, :2]
    expected = detector_laws.read_objects(made, {"o": fields.astype(np.float64)}, SIDES)
    assert expected is not None
    assert len(expected["objects"]) > 2
    assert list(differ(answer(made, fields), expected)) == []


@pytest.mark.parametrize(
    ("image", "detections"),
    [
        ((), {"box": "xywh"}),
        ((), {"threshold": 0.2}),
        ((), {"nms": None}),
        ((), {"activation": "sigmoid"}),
        ({"letterbox": None}, ()),
        ({"letterbox": {"fill": 114, "place": "corner"}}, ()),
    ],
)
def test_a_fault_of_a_detectors_answers_is_caught(image: Any, detections: Any) -> None:
    fields = draw(50, 3)
    expected = detector_laws.read_objects(
        contract({"o": [50, 7]}), {"o": fields.astype(np.float64)}, (90, 60)
    )
    served = contract({"o": [50, 7]}, image, detections)
    assert expected is not None
    assert list(differ(answer(served, fields, (90, 60)), expected))


def test_a_graph_that_chose_itself_is_answered_without_its_padding() -> None:
    made = contract({"o": [3, 6]}, (), {"layout": "final", "box": "xyxy", "nms": None})
    rows = np.array([[10, 12, 30, 40, 0.5, 2], [1, 2, 3, 4, 0.9, 0], [0, 0, 0, 0, 1, -1]])
    assert [o["label"] for o in answer(made, rows)["objects"]] == ["cat", "owl"]


def test_the_probability_of_an_object_multiplies_that_of_its_label() -> None:
    made = contract({"o": [1, 8]}, (), {"layout": "objectness"})
    (found,) = answer(made, np.array([30, 30, 10, 10, 0.5, 0.1, 0.8, 0.2]))["objects"]
    assert (found["label"], found["score"]) == ("dog", pytest.approx(0.4))


@pytest.mark.parametrize("image", [{}, {"bgr": True, "resample": "bicubic"}, {"letterbox": None}])
@pytest.mark.parametrize("sides", [(3, 50), (64, 96), (333, 200)])
def test_pixels_are_those_of_pillow_and_torch(image: Any, sides: tuple[int, int]) -> None:
    made = contract({"o": [1, 7]}, image)
    pixels = np.random.default_rng(1).integers(0, 256, (*sides, 3), dtype=np.uint8)
    expected = prepared_pixels.prepare(made.images, Image.fromarray(pixels))
    array = tasks.encode(made, None, [pixels])["x"]
    assert prepared_pixels.agree(array, expected)


def test_a_pixel_that_no_rounding_explains_differs() -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (50, 90, 3), dtype=np.uint8))
    made = contract({"o": [1, 7]})
    expected = prepared_pixels.prepare(made.images, image)
    brighter = contract({"o": [1, 7]}, {"letterbox": {"fill": 115, "place": "centre"}})
    filled = tasks.encode(brighter, None, [np.asarray(image)])["x"]
    one_step = expected[0].copy()
    one_step[0, 0, 32, 7] = (np.rint(one_step[0, 0, 32, 7] * 255) + 1) * (1 / 255)
    assert len(expected) == 2
    assert not prepared_pixels.agree(filled, expected)
    assert not prepared_pixels.agree(one_step, expected)


def test_suppression_drops_only_boxes_of_the_same_label() -> None:
    boxes = np.array([[0, 0, 10, 10], [1, 0, 11, 10], [0, 1, 10, 11]], np.float32)
    found = detector.Objects(np.array([0.9, 0.8, 0.7], np.float32), np.array([0, 1, 0]), boxes)
    assert detector.suppress(found, 0.5, 10).tolist() == [0, 1]


def test_a_box_with_a_negative_side_drops_no_other() -> None:
    boxes = np.array([[40, 40, 20, 60], [0, 0, 10, 10], [1, 0, 11, 10]], np.float32)
    found = detector.Objects(np.array([0.9, 0.8, 0.7], np.float32), np.zeros(3, int), boxes)
    assert detector.suppress(found, 0.5, 10).tolist() == [0, 1]
    chosen = detector_laws.suppress(boxes, found.scores[None], 0.25, 0.5, 10)
    assert chosen == [(0, 0), (0, 1)]


@pytest.mark.parametrize("sides", [(4000, 1), (1, 4000)])
def test_an_image_of_less_than_a_pixel_lies_where_the_ledger_expects_it(
    sides: tuple[int, int],
) -> None:
    made, fields = contract({"o": [50, 7]}), draw(50, 3)
    fields[:, :2] += [16, 0]  # about the centre of the model's input, where the image lies
    expected = detector_laws.read_objects(made, {"o": fields.astype(np.float64)}, sides)
    assert expected is not None
    assert list(differ(answer(made, fields, sides), expected)) == []


def test_suppression_leaves_what_that_of_onnx_runtime_leaves() -> None:
    fields, shape = draw(80, 4), [1, len(LABELS), 80]
    low, high = fields[:, :2] - fields[:, 2:4] / 2, fields[:, :2] + fields[:, 2:4] / 2
    best = np.eye(len(LABELS), dtype=bool)[fields[:, 4:].argmax(1)]
    scores = np.where(best, fields[:, 4:], 0).T
    corners = np.concatenate([low, high], 1)
    limits = [np.array([60]), np.array([0.5], np.float32), np.array([0.25], np.float32)]
    graph = helper.make_graph(
        [helper.make_node("NonMaxSuppression", ["boxes", "scores", "m", "o", "t"], ["kept"])],
        "g",
        [
            helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [1, 80, 4]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, shape),
        ],
        [helper.make_tensor_value_info("kept", TensorProto.INT64, [None, 3])],
        [numpy_helper.from_array(a, n) for a, n in zip(limits, "mot", strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (kept,) = session.run(None, {"boxes": corners[None], "scores": scores[None]})
    expected = {(int(label), int(at)) for _, label, at in kept}
    assert set(detector_laws.suppress(corners, scores, 0.25, 0.5, 60)) == expected
    order = np.argsort(-fields[:, 4:].max(1), kind="stable")
    order = order[fields[order, 4:].max(1) > 0.25]
    labels = fields[order, 4:].argmax(1)
    ours = detector.suppress(detector.Objects(fields[order, 0], labels, corners[order]), 0.5, 180)
    assert {(int(labels[i]), int(order[i])) for i in ours} == expected
    assert 5 < len(expected) < len(order)
