"""Row of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.data.image_truth.objects import Labelled
from optimizer.data.image_truth.poses import Pose
from optimizer.data.pictures import Picture
from optimizer.harness.inputs.boxes.boxed_image import Boxed
from optimizer.harness.inputs.boxes.warp import Box
from optimizer.harness.inputs.tensors import TensorRow

LATER = (
    *("labels", "scores", "messages", "answers", "arrays"),
    *("objects", "keypoints", "mask", "depth", "reduced"),
)
"""Fields that as_row omits where they are None."""


@dataclass(frozen=True)
class Sample:
    """One row of a data set: a text, a pair of texts, an image, a conversation, or arrays.

    messages: a conversation as {"role", "content"} each, whose plain text is in `text`; () where
        `text` is the conversation rendered by the model's chat template; None: not a conversation
    """

    text: str = ""
    text_pair: str | None = None
    label: int | None = None  # id of the class
    labels: tuple[int, ...] | None = None  # ids of the classes of a multi-label model, ascending
    score: float | None = None  # target of regression or similarity
    scores: tuple[float, ...] | None = None  # targets of a regression with several outputs
    words: tuple[str, ...] | None = None  # for token-classification; `text` is the words joined
    tags: tuple[int, ...] | None = None  # a tag id per word
    image: Picture | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    arrays: TensorRow | None = None  # arrays of the model's inputs
    objects: tuple[Labelled, ...] | None = None  # of an image; () where there is none
    keypoints: tuple[Pose, ...] | None = None  # of the poses in an image
    mask: Picture | None = None  # a label id for each pixel
    depth: Picture | None = None  # a number for each pixel
    reduced: bool | None = None  # True: values of `mask` are label ids plus 1, and 0 is ignored
    answers: tuple[str, ...] | None = None  # right answers to a question; () where there is none

    @property
    def input(self) -> Any:
        """Text, image (perhaps with boxes) or arrays of a data set's row, as the harness takes
        them."""
        if self.arrays is not None:
            return self.arrays
        if self.image is not None and self.boxes is not None:
            return Boxed(self.image.source, self.boxes)
        return self.text if self.image is None else self.image.source

    @property
    def boxes(self) -> tuple[Box, ...] | None:
        """Boxes of a data set's image in which the model is to find keypoints; None for a row
        without poses."""
        if self.keypoints is None:
            return None
        return tuple(pose.box for pose in self.keypoints if pose.read)

    def as_row(self) -> dict[str, Any]:
        """Return the data set's row as JSON, with digests in place of images and arrays."""
        row = {**vars(self)}
        if self.arrays is not None:
            row["arrays"] = self.arrays.sha256
        image = row.pop("image")
        for field in LATER:
            if row[field] is None:
                del row[field]
            elif isinstance(row[field], Picture):
                row[field] = row[field].sha256
        if self.objects is not None:
            row["objects"] = [vars(one) for one in self.objects]
        if self.keypoints is not None:
            row["keypoints"] = [vars(one) for one in self.keypoints]
        return row if image is None else {**row, "image": image.sha256}
