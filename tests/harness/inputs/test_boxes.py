"""Boxes of an image: their pixels and keypoints are those of transformers' VitPose processor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.harness.inputs.boxes.boxed_image import read_boxes
from optimizer.harness.inputs.boxes.warp import Box, cut
from optimizer.harness.inputs.image_file import UnreadableImage
from optimizer.harness.tasks.images.heatmaps import keypoints
from tests.vision import picture, processor

BOXES: list[Box] = [
    (0.0, 0.0, 40.0, 35.0),  # the whole image
    (3.5, 2.25, 20.0, 9.125),
    (-7.0, 12.0, 15.0, 60.0),
    (38.0, 33.0, 1.0, 1.0),
    (5.0, 5.0, 0.1, 30.0),
]


@pytest.fixture
def vitpose() -> Any:
    return processor("vitpose", size={"height": 48, "width": 32})


def test_a_box_is_cut_out_as_transformers_does(vitpose: Any) -> None:
    vitpose.do_rescale = vitpose.do_normalize = False
    image = picture(35, 40)
    expected = vitpose(image, boxes=[[list(b) for b in BOXES]], return_tensors="np")
    for box, right in zip(BOXES, expected["pixel_values"], strict=True):
        ours = cut(np.asarray(image), box, 48, 32)
        assert np.ptp(right) > 0
        np.testing.assert_array_equal(ours, np.moveaxis(right, 0, -1))


def heatmaps(kind: str) -> Any:
    """Bumps at any place, borders included; or noise, also without a value above 0."""
    rng = np.random.default_rng(0)
    rows, columns = np.indices((12, 8))
    if kind == "noise":
        noise = rng.normal(size=(17, 12, 8))
        noise[::4] = -np.abs(noise[::4])
        return noise.astype(np.float32)
    at = rng.uniform(-0.5, (12, 8), (17, 2))
    apart = (rows - at[:, :1, None]) ** 2 + (columns - at[:, 1:, None]) ** 2
    return np.exp(-apart / 2 / rng.uniform(0.5, 3, (17, 1, 1))).astype(np.float32)


@pytest.mark.parametrize("kind", ["bumps", "noise"])
def test_keypoints_are_those_of_transformers(vitpose: Any, kind: str) -> None:
    maps = heatmaps(kind)
    for box in BOXES:
        outputs = SimpleNamespace(heatmaps=torch.from_numpy(maps)[None])
        ((right,),) = vitpose.post_process_pose_estimation(outputs, boxes=[[list(box)]])
        places, scores = keypoints(maps, box, 48, 32)
        np.testing.assert_array_equal(scores, right["scores"].numpy())
        np.testing.assert_array_equal(places, right["keypoints"].numpy())


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("[[1, 2, 3]]", "not four numbers"),
        ("[[1, 2, true, 4]]", "not four numbers"),
        ("[[1, 2, NaN, 4]]", "not four numbers"),
        ("[[1, 2, 0, 4]]", "a side of 0"),
        ("[[40, 2, 5, 4]]", "outside the image"),
        ("[]", "0 boxes"),
        ('{"boxes": 1}', "no list of boxes"),
        ("[[1, 2, 3, 4]", "not JSON"),
        (str([[1, 2, 3, 4]] * 101), "101 boxes"),
    ],
)
def test_boxes_that_cannot_be_read_are_refused(named: str, problem: str) -> None:
    with pytest.raises(UnreadableImage, match=problem):
        read_boxes(named, 40, 35)
