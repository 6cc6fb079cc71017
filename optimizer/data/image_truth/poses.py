"""Read the poses in an image from a column: boxes with keypoints, as COCO's annotations have
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.data.image_truth.objects import number, read_annotations, read_box
from optimizer.foundation.errors import DataError

ACCEPTED = (
    "a list of {bbox: [left, top, width, height], keypoints: [x, y, v, x, y, v, ...]}, v 0 for a "
    "keypoint without a label"
)


@dataclass(frozen=True)
class Pose:
    """Person or object in an image of a data set, with keypoints.

    box: left, top, width and height in pixels
    keypoints: (x, y, v) each, with v = 0 where the place is unknown; () without keypoints
    area: pixels of the segment; of the box where the data have none
    crowd: True for COCO's iscrowd, a group that metrics leave out
    """

    box: tuple[float, float, float, float]
    keypoints: tuple[tuple[float, float, float], ...]
    area: float
    crowd: bool = False

    @property
    def labelled(self) -> int:
        """Number of keypoints of a data set's pose whose place is annotated."""
        return sum(v > 0 for _, _, v in self.keypoints)

    @property
    def read(self) -> bool:
        """True for a data set's box in which the model is to find keypoints."""
        return not self.crowd and (not self.keypoints or self.labelled > 0)


def read_poses(value: Any, where: str) -> tuple[Pose, ...]:
    """Read the right poses of an image from a column's value. Raises DataError for any other value.

    where: the row, for messages
    """
    each = enumerate(read_annotations(value, where, ACCEPTED, "poses"))
    return tuple(_pose(fields, f"{where}[{i}]") for i, fields in each)


def _pose(fields: Mapping[str, Any], where: str) -> Pose:
    """Read the right pose of one person from one annotation of a data set. Raises DataError for a
    box without area, keypoints that are not triples, and an area that is not positive."""
    box = read_box(fields, where, ACCEPTED)
    if min(box[2:]) <= 0:
        raise DataError(f"the box {list(box)} has no area", where=where, accepted=ACCEPTED)
    flat = fields.get("keypoints") or []
    if isinstance(flat, Sequence) and all(isinstance(one, Sequence) for one in flat):
        flat = [value for one in flat for value in one]
    numbers = isinstance(flat, Sequence) and all(number(value) for value in flat)
    if not numbers or len(flat) % 3:
        raise DataError(
            f"{str(flat)[:80]} is not a list of x, y, v", where=where, accepted=ACCEPTED
        )
    area = fields.get("area")
    if area is not None and not (number(area) and area > 0):
        raise DataError(f"the area {area} is not above 0", where=where, accepted="pixels")
    triples = tuple(
        (float(x), float(y), float(v))
        for x, y, v in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    )
    own = box[2] * box[3] if area is None else float(area)
    return Pose(box, triples, own, bool(fields.get("iscrowd")))


def check_count(poses: Sequence[Pose], labels: Sequence[str], where: str) -> None:
    """Raise DataError for a pose whose number of keypoints differs from the model's."""
    for pose in poses:
        if len(pose.keypoints) not in (0, len(labels)):
            raise DataError(
                f"a pose has {len(pose.keypoints)} keypoints, and the model {len(labels)}",
                where=f"{where}: columns.keypoints",
                accepted=f"x, y, v of each, in this order: {', '.join(labels)}"[:300],
                fix="Keypoints that the data do not have are 0, 0, 0.",
            )
