"""Sections `model.answers` of question answering and `model.zero_shot` of zero-shot classification.

Keys and defaults are those of transformers' pipelines (for question answering, version 4's).
"""

from __future__ import annotations

from collections.abc import Collection

from pydantic import Field, field_validator

from optimizer.foundation.sections.fields import Length, Pattern
from optimizer.foundation.sections.section import Section
from optimizer.harness import tasks
from optimizer.harness.span_settings import SpanSettings
from optimizer.harness.zero_shot_settings import is_template

SLOTS = ("{query}", "{document}")  # places of texts in a template
SECTIONS = {"max_active_dims": "sparse"}  # {key: section of the contract, where named otherwise}
ZERO_SHOT = "zero_shot"
WINDOW, SHARED = 384, 128  # maximum tokens of a window, and that two windows share


class SpanAnswers(Section):
    """Search for the answer to a question in its context."""

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
        """Return the contract's section about answers.

        max_length: tokens of a window
        """
        stride = min(max_length // 2, SHARED) if self.doc_stride is None else self.doc_stride
        return SpanSettings(stride, self.max_answer_len, self.handle_impossible_answer, self.top_k)


class ZeroShot(Section):
    """Labels of zero-shot classification, and the sentence that each one is put into."""

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
        """Return the sentence about an input, with {} in place of the label."""
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
    """Split a template at its places {query} and {document}; return the three parts. Raises
    ValueError unless each place occurs once, in this order."""
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
