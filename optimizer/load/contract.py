"""Write the I/O contract of a model: its inputs, its outputs, and the steps before and after it."""

from __future__ import annotations

from typing import Any

from optimizer.foundation.errors import CheckpointError, RecipeError, suggest
from optimizer.harness.contract import SECTIONS, VERSION
from optimizer.harness.inputs.text import TEXT
from optimizer.harness.tasks.images.zero_shot_image_classification import VECTOR
from optimizer.harness.tasks.text_classification import THRESHOLD
from optimizer.load.config.model_folder import model_folder
from optimizer.load.preparation import Described, Preparation
from optimizer.load.providers import pairs
from optimizer.load.sentence import cross_encoder, logit_score
from optimizer.model.architectures.towers import TOWERS


def build_contract(d: Described, preparation: Preparation, conversion: Any) -> dict[str, Any]:
    """Build the document of contract.json, version 3, for a loaded checkpoint. conversion: result
    of `preparation.convert`. Raises CheckpointError for labels that a contract cannot express."""
    sections: dict[str, Any] = dict.fromkeys(SECTIONS)
    sections |= preparation.sections(d, conversion)
    widths = dict(preparation.widths(d, sections))
    outputs = {d.task.output: d.task.axes, **d.task.beside}
    if "labels" in d.task.sections:
        sections["labels"] = _labels(d.config, distinct=d.task.classifies)
    if d.task.classifies:
        widths["labels"] = len(sections["labels"])
        if d.section.aggregation is not None:
            sections["aggregation"] = d.section.aggregation
        if d.task.names_labels:
            sections |= _of_named_labels(d, sections["labels"])
            if d.section.side_of_texts is not None:
                sections["label_texts"] = pairs.label_texts(d)
                widths["width"] = TOWERS[d.config.model_type].width(d.config)
                outputs[VECTOR] = ("batch", "width")
        elif not d.task.per_position:
            scored = logit_score.takes(d.section, model_folder(d.root))
            cross_encoder.check(d.root, templated="template" in sections, scored=scored)
            _check_one_score(d, sections["labels"])
            if activation := cross_encoder.read_activation(d.root, d.config, ranks=d.task.ranks):
                sections["activation"] = activation
            sections |= _several_answers(d, sections["labels"])
    return {
        "version": VERSION,
        "task": d.task.name,
        "input_kind": d.task.inputs.name,
        "inputs": [
            {"name": name, "dtype": dtype, "axes": list(axes)}
            for name, (dtype, axes) in preparation.inputs(d, sections).items()
        ],
        "outputs": [
            {"name": name, "dtype": "float32", "axes": [widths.get(axis, axis) for axis in axes]}
            for name, axes in outputs.items()
        ],
        **sections,
    }


def _of_named_labels(d: Described, labels: list[str]) -> dict[str, Any]:
    """Return {"activation": "sigmoid"} of a pair that judges each label by itself; {} of one that
    compares them. Raises RecipeError for settings that have no effect."""
    alone = TOWERS[d.config.model_type].sigmoid
    if d.section.zero_shot is not None and d.section.zero_shot.multi_label:
        raise RecipeError(
            "multi_label is for texts: the model itself says if labels exclude each other",
            where="model.zero_shot.multi_label",
            accepted="false",
        )
    if len(labels) < 2 and not alone:
        raise RecipeError(
            "one label was found, and its score would be 1 for every image: scores are shares",
            where="model.zero_shot.candidate_labels",
            accepted="two labels or more",
        )
    return {"activation": "sigmoid"} if alone else {}


SEVERAL = {"multi_label_classification": "sigmoid", "regression": "identity"}
"""{problem_type of a model whose labels do not exclude each other: its activation}."""


def _several_answers(d: Described, labels: list[str]) -> dict[str, Any]:
    """Return {"activation": ...} for a multi-label model or a regression with several outputs, with
    "thresholds" where model.thresholds is set; {} for a model of another kind.

    Raises RecipeError for model.thresholds of a model that is not multi-label."""
    problem = getattr(d.config, "problem_type", None)
    thresholds, where = d.section.thresholds, "model.thresholds"
    if thresholds is not None and (problem != "multi_label_classification" or len(labels) < 2):
        raise RecipeError(
            f"the model's problem_type is {problem or 'not set'}, and it has {len(labels)} labels",
            where=where,
            accepted="thresholds of a model with problem_type multi_label_classification",
            fix="Remove model.thresholds.",
        )
    if len(labels) < 2 or problem not in SEVERAL:
        return {}
    if d.task.inputs is not TEXT:
        raise CheckpointError(
            f"{problem} is not covered for task {d.task.name}: it gives each input one label",
            where="config.json: problem_type",
            accepted="single_label_classification, or none",
        )
    if thresholds is None:
        return {"activation": SEVERAL[problem]}
    if isinstance(thresholds, float):
        thresholds = dict.fromkeys(labels, thresholds)
    if unknown := [name for name in thresholds if name not in labels]:
        raise RecipeError(
            f"{unknown[0]!r} is not a label{suggest(unknown[0], labels)}",
            where=where,
            accepted=", ".join(labels),
        )
    each = [thresholds.get(label, THRESHOLD) for label in labels]
    return {"activation": SEVERAL[problem], "thresholds": each}


def _check_one_score(d: Described, labels: list[str]) -> None:
    """Raise CheckpointError for a classifier of several labels under a task that gives one
    score."""
    if d.task.ranks and len(labels) != 1:
        raise CheckpointError(
            f"the model has {len(labels)} labels, and task {d.task.name} reads one score",
            where="config.json: id2label",
            accepted="a model with one label, as CrossEncoder(num_labels=1) trains it",
            fix="Name another task for a classifier of pairs: `optimize init` proposes it.",
        )


def _label_name(i: object, label: object) -> str:
    if not isinstance(label, str | int | float):
        raise CheckpointError(
            f"{str(label)[:80]!r} was found",
            where=f"config.json: id2label.{i}",
            accepted="the name of a label",
        )
    return str(label)


def _labels(config: Any, distinct: bool) -> list[str]:
    """Read a classifier's label names from its config, in id order. distinct: False where several
    ids may be called alike, as COCO's numbers without an object are."""
    names = {int(i): _label_name(i, label) for i, label in config.id2label.items()}
    if sorted(names) != list(range(len(names))):
        raise CheckpointError(
            f"the ids are {sorted(names)}",
            where="config.json: id2label",
            accepted=f"every id from 0 to {len(names) - 1}",
            fix="Number the labels in the order of the classifier's outputs.",
        )
    labels = [names[i] for i in range(len(names))]
    repeated = [label for i, label in enumerate(labels) if label in labels[:i]]
    if repeated and distinct:
        raise CheckpointError(
            f"two ids have the name {repeated[0]!r}, so a prediction would be ambiguous",
            where="config.json: id2label",
            accepted="a different name for every id",
            fix="Rename one of them.",
        )
    return labels
