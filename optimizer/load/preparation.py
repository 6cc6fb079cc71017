"""Record of the steps of loading that depend on the kind of a model's inputs: the contract's
sections, and the files besides the weights that the harness opens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from optimizer.harness import tasks
from optimizer.model.architectures.family_record import Family
from optimizer.recipe.schema import Model


@dataclass(frozen=True)
class Described:
    """Checkpoint while stage load reads it: its recipe section, files, config and model
    skeleton."""

    section: Model
    config: Any  # transformers'
    model: nn.Module  # without weights
    family: Family
    files: Path  # folder of config.json and the other files besides weights
    root: Path  # folder of a sentence-transformers model's modules.json: `files` or above it

    @property
    def task(self) -> tasks.Task:
        return tasks.find_task(self.section.task)


@dataclass(frozen=True)
class Preparation:
    """Steps by which load prepares one kind of input, such as texts or images.

    noun: name of a model that takes this input, for messages
    first: name of the model's first argument
    convert: (described, out) -> argument of `sections`; writes to `out` the harness's files
    sections: (described, result of convert) -> {section of the contract: value}
    inputs: (described, sections) -> {input: (dtype, axes)}
    widths: (described, sections) -> {axis of an output: its size}
    """

    noun: str
    first: str
    convert: Callable[[Described, Path], Any]
    sections: Callable[[Described, Any], dict[str, Any]]
    inputs: Callable[
        [Described, Mapping[str, Any]], Mapping[str, tuple[str, tuple[str | int, ...]]]
    ]
    widths: Callable[[Described, Mapping[str, Any]], Mapping[str, int]]
