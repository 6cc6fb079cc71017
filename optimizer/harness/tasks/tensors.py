"""tensors: named arrays in, named arrays out, for models that no other task covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ..inputs.batch import Array, Batch
from ..inputs.tensors import TENSORS
from .task import Task, unchanged

if TYPE_CHECKING:
    from ..contract import Contract

SHOWN = 6  # numbers of an output in a line


def sizes(contract: Contract) -> tuple[int, ...]:
    """Return how many numbers each output of the task `tensors` has per row."""
    return tuple(prod(int(axis) for axis in o.axes[1:]) for o in contract.outputs)


def split(contract: Contract, values: Array) -> dict[str, Array]:
    """Split for the answer a row's outputs, which the model gives joined as (batch, numbers), into
    {output: (batch, ...)}."""
    arrays, start = {}, 0
    for output, size in zip(contract.outputs, sizes(contract), strict=True):
        shape = (len(values), *(int(axis) for axis in output.axes[1:]))
        arrays[output.name] = values[:, start : start + size].reshape(shape)
        start += size
    return arrays


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of the task `tensors`, {output: nested list of floats} per row."""
    del batch
    arrays = split(contract, values)
    return [
        {name: array[i].astype(float).tolist() for name, array in arrays.items()}
        for i in range(len(values))
    ]


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {field of the task's answer: (dtype, shape per input)} for servers that send
    arrays."""
    return {o.name: ("float32", tuple(int(a) for a in o.axes[1:])) for o in contract.outputs}


def line(answer: Mapping[str, Any]) -> str:
    """Write an answer of the task `tensors` in one line for a person: the first numbers of each
    output."""
    parts = []
    for name, value in answer.items():
        flat = list(_numbers(value))
        more = f" ...  ({len(flat)} numbers)" if len(flat) > SHOWN else ""
        parts.append(f"{name}: {' '.join(f'{x:.4g}' for x in flat[:SHOWN])}{more}")
    return "  ".join(parts)


def _numbers(value: Any) -> Sequence[float]:
    if not isinstance(value, list):
        return [value]
    return [x for part in value for x in _numbers(part)]


TASK = Task(
    name="tensors",
    inputs=TENSORS,
    output="",
    axes=(),
    metrics={
        "cosine": (),
        "accuracy": (("label",),),
        "top5_accuracy": (("label",),),
        "agreement": (),
    },
    decode=unchanged,
    answers=answers,
    line=line,
    tensors=tensors,
    arrays=None,
    of_file=True,
    not_in_browser="the page there reads texts, not tensors",
)
