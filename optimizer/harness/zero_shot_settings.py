"""Settings of zero-shot classification: the sections `zero_shot` (of texts) and `label_texts` (of
images) of a contract, with the names that transformers' pipelines give them."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import require

SLOT = "{}"  # place of a label in a template


def is_template(text: str) -> bool:
    """Return True for a template of a contract: a text with one SLOT and no other brace."""
    return text.count(SLOT) == text.count("{") == text.count("}") == 1


@dataclass(frozen=True)
class ZeroShotSettings:
    """Section `zero_shot` of a bundle's contract: the choice among labels that a request may give.

    candidate_labels: labels of a request that gives none
    hypothesis_template: sentence about a text, with SLOT in place of a label
    multi_label: True if each label is judged by itself
    entailment: id of the model's label "entailment": the sentence follows from the text
    """

    candidate_labels: tuple[str, ...]
    hypothesis_template: str
    multi_label: bool
    entailment: int

    def __post_init__(self) -> None:
        labels = self.candidate_labels
        require(bool(labels) and all(labels), "zero_shot.candidate_labels", labels, "one or more")
        template = self.hypothesis_template
        accepted = f"a sentence with one {SLOT}"
        require(is_template(template), "zero_shot.hypothesis_template", template, accepted)
        require(self.entailment >= 0, "zero_shot.entailment", self.entailment, "0 or more")

    def hypothesis(self, label: str) -> str:
        """Return the sentence about a label."""
        return self.hypothesis_template.replace(SLOT, label)


@dataclass(frozen=True)
class LabelTexts:
    """Section `label_texts` of a bundle's contract: images are classified by labels of a request.

    The bundle's second model (bundle/label_encoder.py) reads a sentence for each label:

    logit of a label = scale * cosine of the vectors of image and sentence + bias

    hypothesis_template: sentence about an image, with SLOT in place of a label
    scale, bias: parameters of the pair of models, as trained
    """

    hypothesis_template: str
    scale: float
    bias: float

    def __post_init__(self) -> None:
        template = self.hypothesis_template
        accepted = f"a sentence with one {SLOT}"
        require(is_template(template), "label_texts.hypothesis_template", template, accepted)
