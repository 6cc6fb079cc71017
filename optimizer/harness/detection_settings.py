"""Reading of a detector's outputs: the section `detections` of a contract.

All outputs are joined along the axis of their fields, in the contract's order. The fields of a
candidate are:

    scores      4 of its box, then one per label, perhaps with one more for "no object" (softmax)
    objectness  4 of its box, the probability of an object, then one per label
    final       4 of its box, its probability, its label id: the graph has chosen
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import require

LAYOUTS = ("scores", "objectness", "final")
BOXES = ("cxcywh", "xyxy", "xywh")
UNITS = ("pixels", "share")
ACTIVATIONS = ("none", "sigmoid", "softmax")


@dataclass(frozen=True)
class DetectionSettings:
    """Section `detections` of a bundle's contract: the fields of a detector's candidates, and which
    candidates are answered.

    layout: fields, of LAYOUTS
    box: "cxcywh" (centre and size), "xyxy" (two corners) or "xywh" (upper left corner and size)
    units: "pixels" of the model's input, or "share" of its sides, 0 to 1
    activation: function of the scores that gives probabilities; "none" where they are
        probabilities
    nms: intersection over union above which the less probable of two boxes of one label is
        dropped; null: none is dropped
    threshold: least probability of an answer
    most: maximum objects of an image
    """

    layout: str
    box: str
    units: str
    activation: str
    nms: float | None
    threshold: float
    most: int

    def __post_init__(self) -> None:
        accepted = {"layout": LAYOUTS, "box": BOXES, "units": UNITS, "activation": ACTIVATIONS}
        for name, values in accepted.items():
            value: Any = getattr(self, name)
            require(value in values, f"detections.{name}", value, ", ".join(values))
        for name in ("nms", "threshold"):
            share = getattr(self, name)
            fits = share is None or 0 <= share <= 1
            require(fits, f"detections.{name}", share, "0 to 1")
        require(self.most > 0, "detections.most", self.most, "1 or more")
        final = self.layout == "final" and self.activation != "none"
        where = "detections.activation"
        require(not final, where, self.activation, "none, for layout final")

    def count_fields(self, labels: int) -> tuple[int, ...]:
        """Return the numbers of fields that a detector's candidate may have by the contract.

        labels: number of labels
        """
        if self.layout == "final":
            return (6,)
        if self.layout == "objectness":
            return (5 + labels,)
        return (5 + labels,) if self.activation == "softmax" else (4 + labels,)
