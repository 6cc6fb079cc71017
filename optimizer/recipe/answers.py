"""Sections of `model` about inputs and answers: `answers` of question answering, `zero_shot` of
zero-shot classification, `image` and `detections` of an ONNX file's detector.

Keys and defaults of the first two are those of transformers' pipelines (for question answering,
version 4's).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, field_validator

from optimizer.foundation.sections.fields import Length, Pattern
from optimizer.foundation.sections.section import Section
from optimizer.harness import tasks
from optimizer.harness.detection_settings import (
    ACTIVATIONS,
    BOXES,
    LAYOUTS,
    UNITS,
    DetectionSettings,
)
from optimizer.harness.image_settings import FILTERS, LINEAR, ImageSettings, Letterbox
from optimizer.harness.span_settings import SpanSettings
from optimizer.harness.zero_shot_settings import is_template

Share = Annotated[float, Field(ge=0, le=1)]
SLOTS = ("{query}", "{document}")  # places of texts in a template
SECTIONS = {"max_active_dims": "sparse"}  # {key: section of the contract, where named otherwise}
ZERO_SHOT = "zero_shot"
WINDOW, SHARED = 384, 128  # maximum tokens of a window, and that two windows share


class SpanAnswers(Section):
    """Recipe section `model.answers`: search for the answer to a question in its context."""

    doc_stride: int | None = Field(
        None,
        ge=0,
        description="tokens that two windows of a long context share; default: 128, or half of "
        "max_length where that is less",
    )
    max_answer_len: Length = Field(15, description="maximum tokens of an answer")
    handle_impossible_answer: bool = Field(
        False,
        description='true: return "" if the probability of "no answer" exceeds that of every span; '
        "for models trained with unanswerable questions, such as those of SQuAD 2",
    )
    top_k: int = Field(1, ge=1, le=1000, description="number of answers")

    def settings(self, max_length: int) -> SpanSettings:
        """Convert this section of the recipe to the contract's section about answers.

        max_length: tokens of a window
        """
        stride = min(max_length // 2, SHARED) if self.doc_stride is None else self.doc_stride
        return SpanSettings(stride, self.max_answer_len, self.handle_impossible_answer, self.top_k)


class ImageInput(Section):
    """Recipe section `model.image`: preparation of images for the input of an ONNX file, whose size
    is the file's."""

    resize: Literal["letterbox", "stretch"] = Field(
        "letterbox",
        description="letterbox: keep the proportions and fill the rest; stretch: to both sides",
    )
    fill: int = Field(114, ge=0, le=255, description="letterbox: value of the pixels that it fills")
    place: Literal["centre", "corner"] = Field(
        "centre", description="letterbox: place of the image; corner: the upper left one"
    )
    resample: Literal[(*FILTERS, LINEAR)] = Field(  # type: ignore[valid-type]
        LINEAR,
        description="filter of Pillow, which antialiases, or linear: between the four nearest "
        "pixels, as OpenCV's INTER_LINEAR",
    )
    rescale: float | None = Field(
        1 / 255, gt=0, description="factor of the pixels, which are 0 to 255; null: 1"
    )
    mean: tuple[float, ...] | None = Field(
        None, description="mean to subtract then, per channel; needs std"
    )
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        None, description="deviation to divide by, per channel"
    )
    bgr: bool = Field(False, description="true for a model that reads blue first")

    def settings(self, channels: int, height: int, width: int) -> ImageSettings:
        """Convert this section of the recipe to the contract's section `image` for an input of this
        size. Raises BundleError."""
        boxed = self.resize == "letterbox"
        return ImageSettings(
            channels=channels,
            height=height,
            width=width,
            resize={"height": height, "width": width},
            resample=self.resample,
            crop=None,
            rescale=self.rescale,
            offset=0.0,
            mean=self.mean,
            std=self.std,
            divide=None,
            letterbox=Letterbox(self.fill, self.place) if boxed else None,
            bgr=self.bgr,
        )


class Detections(Section):
    """Recipe section `model.detections`: boxes in the outputs of an ONNX file."""

    labels: tuple[Pattern, ...] = Field(
        min_length=1,
        max_length=10_000,
        description="names of the labels, in the order of their ids",
    )
    layout: Literal[LAYOUTS] = Field(  # type: ignore[valid-type]
        "scores",
        description="numbers of a candidate behind its box, all outputs joined: scores of the "
        "labels; objectness before them; or final: its probability and its label id",
    )
    box: Literal[BOXES] = Field(  # type: ignore[valid-type]
        "cxcywh",
        description="centre and size, two corners (xyxy), or upper left corner and size (xywh)",
    )
    units: Literal[UNITS] = Field(  # type: ignore[valid-type]
        "pixels", description="of boxes: pixels of the model's input, or share of its sides"
    )
    activation: Literal[ACTIVATIONS] = Field(  # type: ignore[valid-type]
        "none",
        description="function of the scores; softmax: the last of them means no object; none: "
        "they are probabilities",
    )
    nms: Share | None = Field(
        0.7,
        description="intersection over union above which the less probable of two boxes of one "
        "label is dropped; null: none, because the graph does it",
    )
    threshold: Share = Field(0.25, description="least probability of an answer")
    most: int = Field(300, ge=1, le=10_000, description="maximum objects of an image")

    def settings(self) -> DetectionSettings:
        """Convert this section of the recipe to the contract's section `detections`."""
        return DetectionSettings(**self.model_dump(exclude={"labels"}))


class ZeroShot(Section):
    """Recipe section `model.zero_shot`: labels of zero-shot classification, and the sentence that
    each one is put into."""

    candidate_labels: tuple[Pattern, ...] = Field(
        min_length=1,
        max_length=1000,
        description="labels of a request that names none, and of the evaluation",
    )
    hypothesis_template: str | None = Field(
        None,
        description="sentence with {} in place of a label; default, as transformers' pipelines "
        'have: "This example is {}." of a text, "This is a photo of {}." of an image',
    )
    multi_label: bool = Field(False, description="texts only; true: each label is judged by itself")
    labels_of_requests: bool = Field(
        False,
        description="images only; true: a request may bring other labels, which the side of texts "
        "reads: the bundle then holds it too, in float32",
    )

    @field_validator("hypothesis_template")
    @classmethod
    def _has_a_place_for_a_label(cls, template: str | None) -> str | None:
        if template is not None and not is_template(template):
            raise ValueError(f"{template!r} has no single {{}}, in whose place a label stands")
        return template

    def template(self, task: tasks.Task) -> str:
        """Return the recipe's sentence about an input, with {} in place of the label."""
        default = "This is a photo of {}." if task.names_labels else "This example is {}."
        return self.hypothesis_template or default


def check_zero_shot(task: tasks.Task, section: ZeroShot | None) -> None:
    """Raise ValueError where labels_of_requests is given for a task on texts; it is for images."""
    if section is not None and section.labels_of_requests and not task.names_labels:
        raise ValueError(
            "model.zero_shot.labels_of_requests is for images; a request to a model of texts may "
            "always bring its labels; remove it"
        )


def split_template(template: str) -> list[str]:
    """Split the recipe's `model.template` at its places {query} and {document}; return the three
    parts. Raises ValueError unless each place occurs once, in this order."""
    before, first, rest = template.partition(SLOTS[0])
    between, second, after = rest.partition(SLOTS[1])
    if not (first and second) or any(template.count(slot) != 1 for slot in SLOTS):
        raise ValueError(f"it needs {SLOTS[0]} and behind it {SLOTS[1]}, once each")
    return [before, between, after]


def check(task: tasks.Task, keys: Collection[str], sections: Collection[str]) -> None:
    """Raise ValueError for keys and sections of the recipe that do not suit the task.

    keys: task-specific keys that `model` has
    sections: those of reduce, qat and slo that the recipe has
    """
    for name in keys:
        section = SECTIONS.get(name, name)
        named = task.names_labels and name == ZERO_SHOT
        if section not in task.optional and not named:
            others = ", ".join(n for n, t in tasks.TASKS.items() if section in t.optional)
            raise ValueError(
                f"model.{name} is for task {others}, and the task is {task.name}; remove it, or "
                "set model.task"
            )
    if task.needs_labels and ZERO_SHOT not in keys:
        raise ValueError(
            f"model.zero_shot is missing, and task {task.name} needs the labels that the "
            "evaluation chooses from; add zero_shot: {candidate_labels: [...]}"
        )
    if "slo" in sections and task.extracts:
        raise ValueError(
            f"slo: a load test sends single texts, and task {task.name} reads a question with its "
            "context; remove it"
        )
    for name in sections:
        if name != "slo" and task.weighs:
            raise ValueError(
                f"{name}: it compares probabilities of tokens, which leave the weights of task "
                f"{task.name} open; remove it"
            )
        if name != "slo" and task.in_parts:
            raise ValueError(
                f"{name}: it trains on one row of the model for an input, and the model reads an "
                f"input of task {task.name} in several; remove it"
            )
