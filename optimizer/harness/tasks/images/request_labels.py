"""Encode images with the labels of their request, which the model in the bundle's folder `texts`
reads.

The labels of an image are its second input, as in inputs/hypothesis.py: names with a comma between,
a JSON list of names, or a JSON object with candidate_labels and hypothesis_template. Without it
they are the contract's, whose vectors are weights of the image's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ...inputs import image
from ...inputs.batch import Array
from ...inputs.hypothesis import ACCEPTED, NAMES, read_settings
from ...inputs.image import IMAGE
from ...inputs.kind import Encoded
from ...inputs.text import check_text
from ...zero_shot_settings import ZeroShotSettings

if TYPE_CHECKING:
    from ...contract import Contract

MOST = 1000  # labels of a request, as of a recipe


class LabelEncoder(Protocol):
    """Interface of an encoder of sentences about images, for labels of a request. Raises
    HarnessError where it cannot run."""

    def problem(self, texts: Sequence[str]) -> str:
        """Return why a label's text cannot be read; "" if all can."""

    def vectors(self, texts: Sequence[str]) -> Array:
        """Return label texts' vectors of unit length, (texts, width)."""


@dataclass(frozen=True)
class LabelledImage:
    """An image with the labels of its request.

    image: the image as it was given
    weights: vectors of the labels' sentences, (labels, width), times the model's logit scale
    """

    image: Any
    labels: tuple[str, ...]
    weights: Array
    bias: float


def encode(
    contract: Contract,
    encoder: LabelEncoder | None,
    images: Sequence[Any],
    labels: Sequence[str | None] | None = None,
    size: int | None = None,
) -> list[Encoded]:
    """Encode, with a request's labels, each image as image.encode does.

    The `input` of an image with labels becomes a LabelledImage. Labels that cannot be read get a
    `problem`.

    encoder: encoder of sentences; None for a bundle that answers with the recipe's labels alone
    labels: labels per image, as described above; None: the contract's
    """
    encoded = image.encode(contract, None, images, None, size)
    if labels is None:
        return encoded
    return [
        one if named is None or one.problem else _encode_labels(contract, encoder, one, named, i)
        for i, (one, named) in enumerate(zip(encoded, labels, strict=True))
    ]


def _encode_labels(
    contract: Contract, encoder: LabelEncoder | None, one: Encoded, named: str, number: int
) -> Encoded:
    """Add the labels of a request to one encoded image, or a `problem`.

    one: encoded image
    named: labels of the request
    number: index of the image, for messages
    """
    texts = contract.label_texts
    if texts is None or encoder is None:
        return replace(
            one,
            problem="labels were given, and this model answers with those of its recipe",
            fix="Set model.zero_shot.labels_of_requests: true in the recipe, and run it.",
        )
    default = ZeroShotSettings(contract.labels or (), texts.hypothesis_template, False, 0)
    settings, problem = read_settings(default, named)
    if problem:
        return replace(one, problem=problem, fix=f"Give {ACCEPTED}.")
    for label in settings.candidate_labels:
        check_text(label, f"labels[{number}]")
    problem, fix = _refusal(contract, settings)
    sentences = [] if problem else [settings.hypothesis(x) for x in settings.candidate_labels]
    if not problem and (problem := encoder.problem(sentences)):
        fix = "Shorten or reword it."
    if problem:
        return replace(one, problem=problem, fix=fix)
    weights = encoder.vectors(sentences) * texts.scale
    labelled = LabelledImage(one.input, settings.candidate_labels, weights, texts.bias)
    return replace(one, input=labelled)


def _refusal(contract: Contract, settings: ZeroShotSettings) -> tuple[str, str]:
    """Return (reason why these labels cannot be answered, remedy); ("", "") if they can."""
    labels = settings.candidate_labels
    if settings.multi_label:
        return (
            "multi_label is for texts: the model itself says if labels exclude each other",
            "Leave it out.",
        )
    if len(labels) > MOST:
        return f"there are {len(labels)} labels", f"Give up to {MOST}."
    if repeated := next((x for i, x in enumerate(labels) if x in labels[:i]), None):
        return f"label {repeated[:60]!r} comes twice", "Give each label once."
    if len(labels) < 2 and contract.activation is None:
        return (
            "one label was found, and its score would be 1 for every image: scores are shares",
            "Give two labels or more.",
        )
    return "", ""


LABELLED_IMAGE = replace(IMAGE, encode=encode, requested=("image", NAMES[0]))
