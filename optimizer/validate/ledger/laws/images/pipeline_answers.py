"""Answers that transformers' pipelines give for objects, masks and depths, from a model's outputs.

compared   scores, labels and boxes of objects; the label of each pixel; the depth of each pixel
limit      the float32 rounding of a softmax or sigmoid, of a box's corners, and of an interpolated
           pixel. Where two labels are equal within it, either is right; a corner within it of a
           whole pixel may be truncated to either
caught     boxes scaled by another size, a threshold, a label, an interpolation with aligned
           corners: test_a_fault_of_an_answer_is_caught

The size of the image is Pillow's, after EXIF. Called through answer_laws.EXPECTED.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optimizer.harness.inputs import image_file
from optimizer.harness.inputs.batch import Array, Batch
from optimizer.harness.tasks.images import (
    depth_estimation,
    image_segmentation,
    object_detection,
    universal_segmentation,
)
from optimizer.validate.ledger.laws.answer_fields import FREE, Judged, Near, OneOf
from optimizer.validate.ledger.laws.image_laws import open_by_pillow
from optimizer.validate.ledger.pieces.roundoff import SMALLEST, UNIT

if TYPE_CHECKING:
    from optimizer.validate.ledger.laws.answer_laws import ReferencePipeline

CORNERS = 4
THRESHOLD = 0.5  # transformers' default
EXPONENTIAL = 6  # roundoffs of a float32 exponential, as in answer_laws.py
CORNER = 8  # roundoffs of a corner: centre, half of a size, their sum, and the product with a side
SHADE = 1  # steps of 255 by which a rounded quotient may differ


class PipelineOutputs(dict[str, Any]):
    """Outputs of a model as transformers' pipelines read them: by name and as attributes."""

    __getattr__ = dict.__getitem__


def _sides(reference: ReferencePipeline, image: Any) -> tuple[int, int]:
    """Return the height and the width of a judged image in pixels."""
    opened = open_by_pillow(image, image_file.MODES[reference.contract.images.channels])
    return int(opened.height), int(opened.width)


def detected(
    reference: ReferencePipeline, image: Any, values: Array, _alone: Batch
) -> dict[str, Any]:
    """Return transformers' answer of object-detection.

    values: outputs (queries, classes + 4): logits, then the box
    """
    logits, boxes = values[:, :-CORNERS], values[:, -CORNERS:]
    height, width = _sides(reference, image)
    outputs = PipelineOutputs(
        logits=torch.from_numpy(np.ascontiguousarray(logits))[None],
        pred_boxes=torch.from_numpy(np.ascontiguousarray(boxes))[None],
        target_size=torch.IntTensor([[height, width]]),
    )
    (raw,) = reference.pipeline.image_processor.post_process_object_detection(
        outputs, THRESHOLD, outputs["target_size"]
    )
    corners = raw["boxes"].numpy()
    listed = reference.pipeline.postprocess(outputs, threshold=THRESHOLD)
    probabilities, bound = _probabilities(reference, logits)
    near = bool((np.abs(probabilities - THRESHOLD) <= bound).any())
    if near or (probabilities.shape == logits.shape and _alike(listed, bound)):
        return {"objects": FREE}
    names = reference.pipeline.model.config.id2label
    reach = CORNER * UNIT["fp32"] * float(np.abs(boxes).max()) * max(height, width)
    objects = []
    for one, box in zip(listed, corners, strict=True):
        score = float(one["score"])
        close = (np.abs(probabilities - score) <= 2 * bound).any(0)
        alike = {names[int(i)] for i in np.flatnonzero(close)} | {one["label"]}
        each = {
            name: Near(value, float(int(at - reach) != int(at + reach)))
            for (name, value), at in zip(one["box"].items(), box.tolist(), strict=True)
        }
        objects.append({"score": Near(score, bound), "label": OneOf(frozenset(alike)), "box": each})
    return {"objects": objects}


def _probabilities(reference: ReferencePipeline, logits: Array) -> tuple[Array, float]:
    """Compute (expected probability of each query and label in float64, bound on its float32
    rounding)."""
    wide = torch.from_numpy(logits).double()
    if logits.shape[-1] == len(reference.contract.labels or ()):
        return wide.sigmoid().numpy(), (EXPONENTIAL + 3) * UNIT["fp32"] + SMALLEST["fp32"]
    shifted = float((logits.max(-1, keepdims=True) - logits).max())
    roundoffs = 2 * shifted + 2 * EXPONENTIAL + logits.shape[-1] + 1
    return wide.softmax(-1)[:, :-1].numpy(), 2 * UNIT["fp32"] * roundoffs


def _alike(listed: list[dict[str, Any]], bound: float) -> bool:
    """Return True where two neighbours in a list of objects, sorted by probability, have
    probabilities equal within the bound, so that their order may differ."""
    return bool((-np.diff([one["score"] for one in listed]) <= 2 * bound).any())


def segmented(reference: ReferencePipeline, image: Any, logits: Array, _alone: Batch) -> Judged:
    """Return a judge of an answer of image-segmentation, by transformers' label of each pixel.

    logits: (classes, rows, columns)
    """
    outputs = PipelineOutputs(logits=torch.from_numpy(np.ascontiguousarray(logits))[None])
    return _judge_labels(reference, image, outputs, outputs["logits"].double(), 0.0)


def segmented_by_queries(
    reference: ReferencePipeline, image: Any, values: Array, _alone: Batch
) -> Judged:
    """Return a judge of an answer of universal-segmentation, by transformers' label of each pixel.

    values: (queries, labels + 1 + pixels): logits, then the mask
    """
    logits, masks = universal_segmentation.split(reference.contract, values)
    enlarged = (universal_segmentation.SIDE, universal_segmentation.SIDE)
    outputs = PipelineOutputs(
        class_queries_logits=torch.from_numpy(np.ascontiguousarray(logits))[None],
        masks_queries_logits=torch.from_numpy(np.ascontiguousarray(masks))[None],
    )
    wide = torch.nn.functional.interpolate(
        outputs["masks_queries_logits"].double(), enlarged, mode="bilinear"
    )
    labels = outputs["class_queries_logits"].double().softmax(-1)[..., :-1]
    scores = torch.einsum("bqc,bqhw->bchw", labels, wide.sigmoid())
    # a sigmoid has a slope of 1/4 or less, and a score is a sum over the queries
    _, rounded = _probabilities(reference, logits)
    sigmoid = _interpolated(masks, enlarged) / 4 + 2 * (EXPONENTIAL + 3) * UNIT["fp32"]
    added = 2 * (len(logits) + 1) * UNIT["fp32"]
    bound = float(labels.sum(1).max()) * (sigmoid + rounded + added)
    return _judge_labels(reference, image, outputs, scores, bound)


def _judge_labels(
    reference: ReferencePipeline,
    image: Any,
    outputs: PipelineOutputs,
    scores: torch.Tensor,
    bound: float,
) -> Judged:
    """Return a judge of the label of each pixel.

    outputs: outputs of the model, as transformers' processor reads them
    scores: scores of the labels, (1, labels, rows, columns) float64, before they are enlarged
    bound: distance of two float32 computations of a score
    """
    sides = _sides(reference, image)
    judge = reference.pipeline.image_processor.post_process_semantic_segmentation
    expected = judge(outputs, target_sizes=[sides])[0].numpy()
    names = list(reference.contract.labels or ())
    wide = torch.nn.functional.interpolate(scores, sides, mode="bilinear")[0].numpy()
    best = np.sort(wide, 0)
    close = best[-1] - best[-2] if len(best) > 1 else np.full(sides, np.inf)
    near = close <= 2 * (bound + _interpolated(scores.numpy(), sides))

    def problems(answer: Any, where: str) -> Iterator[str]:
        ids = np.asarray(_opened(answer["map"]))
        if ids.shape != sides:
            yield f"{where}map has the shape {ids.shape}, the image {sides}"
            return
        wrong = (ids != expected) & ~near
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            yield (
                f"{where}map has {int(wrong.sum())} pixels of other labels, the first at row "
                f"{row}, column {column}: {ids[row, column]}, transformers {expected[row, column]}"
            )
        present, counts = np.unique(ids, return_counts=True)
        segments = [
            {"label": names[i], "id": int(i), "share": float(c / ids.size)}
            for i, c in zip(present, counts, strict=True)
        ]
        if answer["segments"] != segments:
            yield f"{where}segments are {answer['segments']}; the map has {segments}"

    return Judged(problems)


def measured(reference: ReferencePipeline, image: Any, depths: Array, _alone: Batch) -> Judged:
    """Return a judge of an answer of depth-estimation, by transformers' depth of each pixel.

    depths: outputs (rows, columns)
    """
    sides = _sides(reference, image)
    tensor = torch.from_numpy(np.ascontiguousarray(depths))[None]
    whole = reference.pipeline.postprocess(
        PipelineOutputs(predicted_depth=tensor, target_size=sides)
    )
    expected = whole["predicted_depth"].numpy().reshape(sides)
    bound = _interpolated(depths, sides)

    def problems(answer: Any, where: str) -> Iterator[str]:
        array = np.load(io.BytesIO(base64.b64decode(answer["predicted_depth"])), allow_pickle=False)
        if array.shape != sides or array.dtype != np.float32:
            yield f"{where}predicted_depth is {array.dtype} {array.shape}, not float32 {sides}"
            return
        apart = float(np.abs(array - expected).max())
        if not apart <= bound:
            yield f"{where}predicted_depth is up to {apart:.3g} off; rounding allows {bound:.3g}"
        if (answer["least"], answer["most"]) != (float(array.min()), float(array.max())):
            yield f"{where}least and most are not those of predicted_depth"
        shades = np.asarray(_opened(answer["depth"]), np.int64)
        scale = array.max() - array.min()
        exact = 255 * (array.astype(np.float64) - array.min()) / (scale if scale > 0 else 1)
        if shades.shape != sides or np.abs(shades - np.floor(exact)).max() > SHADE:
            yield f"{where}depth is not predicted_depth in 256 shades"

    return Judged(problems)


def _interpolated(values: Array, sides: tuple[int, int]) -> float:
    """Bound the float32 rounding of an interpolation of `values`: positions up to a side, rounded
    three times, change weights of slope 2 or less; 16 products of weights have sizes that sum to 2
    or less."""
    places = max(*values.shape[-2:], *sides)
    return float(2 * UNIT["fp32"] * (2 * 3 * places + 2 * 20) * np.abs(values).max())


def _opened(text: str) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(text)))


EXPECTED: Mapping[str, Callable[[ReferencePipeline, Any, Array, Batch], Any]] = {
    object_detection.TASK.name: detected,
    image_segmentation.TASK.name: segmented,
    universal_segmentation.TASK.name: segmented_by_queries,
    depth_estimation.TASK.name: measured,
}
PIPELINES = {
    object_detection.TASK.name: "ObjectDetectionPipeline",
    image_segmentation.TASK.name: "ImageSegmentationPipeline",
    universal_segmentation.TASK.name: "ImageSegmentationPipeline",
    depth_estimation.TASK.name: "DepthEstimationPipeline",
}
"""{task: transformers' pipeline class}."""
