"""The I/O contract of a model: what goes in, what comes out, and what is done around it."""

from __future__ import annotations

from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.harness.contract import SECTIONS, VERSION
from optimizer.load.preparation import Described, Preparation


def contract(d: Described, preparation: Preparation, converted: Any) -> dict[str, Any]:
    """The document of contract.json, version 3.

    converted: what the preparation's `convert` returned. Raises CheckpointError for what a contract
    cannot say.
    """
    sections: dict[str, Any] = dict.fromkeys(SECTIONS)
    sections |= preparation.sections(d, converted)
    widths = dict(preparation.widths(d, sections))
    if d.task.classifies:
        sections["labels"] = _labels(d.config)
        widths["labels"] = len(sections["labels"])
        if not d.task.per_position:
            _check_one_label(d.config)
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
    """Several labels at once need a sigmoid each; the softmax of this task would be wrong."""
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise CheckpointError(
            "multi_label_classification is not covered: an input gets one label here",
            where="config.json: problem_type",
            accepted="single_label_classification, regression, or none",
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
    named = {int(i): _label_name(i, label) for i, label in config.id2label.items()}
    if sorted(named) != list(range(len(named))):
        raise CheckpointError(
            f"the ids are {sorted(named)}",
            where="config.json: id2label",
            accepted=f"every id from 0 to {len(named) - 1}",
            fix="Number the labels in the order of the classifier's outputs.",
        )
    labels = [named[i] for i in range(len(named))]
    twice = [label for i, label in enumerate(labels) if label in labels[:i]]
    if twice:
        raise CheckpointError(
            f"two ids are both called {twice[0]!r}, so an answer would not say which it is",
            where="config.json: id2label",
            accepted="a name of its own for every id",
            fix="Rename one of them.",
        )
    return labels
