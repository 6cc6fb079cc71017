"""What loading a model takes that depends on the kind of its inputs, a record per kind.

The contract's sections of a kind, and the files beside the weights that the harness opens.
"""

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
    """A checkpoint that is being loaded: the recipe's section, transformers' config, the model
    without its weights, what is known of the architecture. files: the folder of config.json and
    what belongs to it but the weights; root: where modules.json of a sentence-transformers model is
    (the same, or the folder above)."""

    section: Model
    config: Any
    model: nn.Module
    family: Family
    files: Path
    root: Path

    @property
    def task(self) -> tasks.Task:
        return tasks.task(self.section.task)


@dataclass(frozen=True)
class Preparation:
    """Of one kind of input.

    noun: what a model that takes it is called. first: the first argument of such a model.
    convert: (described, out) -> what `sections` reads; writes to `out` the files that the harness
    opens. sections: (described, converted) -> {section of the contract: value}. inputs: (described,
    sections) -> {input: (dtype, axes)}. widths: (described, sections) -> {axis of an output: its
    size}.
    """

    noun: str
    first: str
    convert: Callable[[Described, Path], Any]
    sections: Callable[[Described, Any], dict[str, Any]]
    inputs: Callable[
        [Described, Mapping[str, Any]], Mapping[str, tuple[str, tuple[str | int, ...]]]
    ]
    widths: Callable[[Described, Mapping[str, Any]], Mapping[str, int]]
