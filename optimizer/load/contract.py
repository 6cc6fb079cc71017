"""Write the I/O contract of a model: its inputs, its outputs, and the steps before and after it."""

from __future__ import annotations

from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.harness.contract import SECTIONS, VERSION
from optimizer.load.config import cross_encoder
from optimizer.load.preparation import Described, Preparation


def build_contract(d: Described, preparation: Preparation, conversion: Any) -> dict[str, Any]:
    """The document of contract.json, version 3. conversion: result of `preparation.convert`. Raises
    CheckpointError for labels that a contract cannot express."""
    sections: dict[str, Any] = dict.fromkeys(SECTIONS)
    sections |= preparation.sections(d, conversion)
    widths = dict(preparation.widths(d, sections))
    if d.task.classifies:
        sections["labels"] = _labels(d.config)
        widths["labels"] = len(sections["labels"])
        if not d.task.per_position:
            _check_one_label(d.config)
            cross_encoder.check(d.root)
            _check_one_score(d, sections["labels"])
            if activation := cross_encoder.activation(d.root, d.config, ranks=d.task.ranks):
                sections["activation"] = activation
    return {
        "version": VERSION,
        "task": d.task.name,
        "input_kind": d.task.inputs.name,
        "inputs": [
            {"name": name, "dtype": dtype, "axes": list(axes)}
            for name, (dtype, axes) in preparation.inputs(d, sections).items()
        ],
        "outputs": [
            {
                "name": d.task.output,
                "dtype": "float32",
                "axes": [widths.get(axis, axis) for axis in d.task.axes],
            }
        ],
        **sections,
    }


def _check_one_label(config: Any) -> None:
    """Raise CheckpointError for multi-label models: they need sigmoids, and the task a softmax."""
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise CheckpointError(
            "multi_label_classification is not covered: the task gives each input one label",
            where="config.json: problem_type",
            accepted="single_label_classification, regression, or none",
        )


def _check_one_score(d: Described, labels: list[str]) -> None:
    """Raise CheckpointError for a model of several labels under a task of one score."""
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


def _labels(config: Any) -> list[str]:
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
    if repeated:
        raise CheckpointError(
            f"two ids have the name {repeated[0]!r}, so a prediction would be ambiguous",
            where="config.json: id2label",
            accepted="a different name for every id",
            fix="Rename one of them.",
        )
    return labels
