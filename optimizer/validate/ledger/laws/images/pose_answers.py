"""Keypoints that transformers' image processor finds in heatmaps.

compared   every number of the harness's answer with post_process_pose_estimation of the same
           heatmaps and boxes, one box at a time: transformers reads, for a keypoint without a value
           above 0, values of the box before it in a batch
limit      DRAWS times: how far transformers' own places move where each value of the heatmaps moves
           by a unit roundoff; the largest, doubled. Scores are equal
caught     places of the heatmap, of the model's size, or without the parabola:
           test_a_fault_of_an_answer_is_caught
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optimizer.harness.inputs.batch import Array, Batch
from optimizer.validate.ledger.laws.answer_fields import Near
from optimizer.validate.ledger.laws.images.pipeline_answers import PipelineOutputs
from optimizer.validate.ledger.pieces.roundoff import UNIT

if TYPE_CHECKING:
    from optimizer.validate.ledger.laws.answer_laws import ReferencePipeline

DRAWS = 4


def posed(
    reference: ReferencePipeline, _image: Any, heatmaps: Array, alone: Batch
) -> dict[str, Any]:
    """Return the expected answer of keypoint-detection.

    heatmaps: outputs (boxes, keypoints, rows, columns)
    alone: the image and its boxes as a batch
    """
    both = zip(heatmaps, alone.encodings, strict=True)
    return {"poses": [_pose(reference, maps, crop.box) for maps, crop in both]}


def _pose(reference: ReferencePipeline, maps: Array, box: tuple[float, ...]) -> dict[str, Any]:
    """Return the expected keypoints of one box, with bounds from perturbed heatmaps.

    maps: heatmaps (keypoints, rows, columns)
    box: box of the pose in the image
    """
    places, scores = _places(reference, maps, box)
    rng = np.random.default_rng(0)
    moved = []
    for _ in range(DRAWS):
        factor = 1 + UNIT["fp32"] * rng.choice((-1.0, 1.0), maps.shape)
        changed = (maps * factor).astype(np.float32)
        moved.append(np.abs(_places(reference, changed, box)[0] - places))
    reach = 2 * np.max(moved, axis=0)
    reach += UNIT["fp32"] * np.abs(places)
    each = zip(reference.contract.labels or (), scores, places, reach, strict=True)
    bound = len(scores) * UNIT["fp32"] * float(np.abs(scores).max())
    return {
        "box": list(box),
        "score": Near(float(scores.mean()), bound),
        "keypoints": [
            {
                "label": name,
                "score": float(score),
                "x": Near(float(x), float(far_x)),
                "y": Near(float(y), float(far_y)),
            }
            for name, score, (x, y), (far_x, far_y) in each
        ],
    }


def _places(
    reference: ReferencePipeline, maps: Array, box: tuple[float, ...]
) -> tuple[Array, Array]:
    """Compute by transformers the places (keypoints, 2) and scores (keypoints,) of the keypoints in
    a person's box from the heatmaps `maps`."""
    outputs = PipelineOutputs(heatmaps=torch.from_numpy(np.ascontiguousarray(maps))[None])
    boxes = [[list(box)]]
    ((pose,),) = reference.processor.post_process_pose_estimation(outputs, boxes=boxes)
    return pose["keypoints"].numpy(), pose["scores"].numpy()
