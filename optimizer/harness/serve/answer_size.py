"""Bytes of an answer, predicted from its request: a short request may ask for a long one.

An answer that would be larger than the server gives (--max-answer) is refused before any of it is
made. What is predicted is never less than what comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from .refusals import TooLargeError
from .tensors import JSON_NUMBER, Array, answer_bytes, datatype

if TYPE_CHECKING:
    from ..contract import Contract
    from ..tasks.task import Task

ENTRY = 256  # bytes of a word or of an entity in an answer's JSON, without its text
ESCAPED = 6  # bytes of a character of a text in JSON: \\u0000
LOGPROB = 512  # bytes that one token and its logarithm take while an answer is made


FEWER = "Ask for fewer rows or outputs at once"


def check_answer(size: int, largest: int, fix: str = FEWER) -> None:
    """Raises TooLargeError."""
    if size > largest:
        raise TooLargeError(
            f"the answer would have up to {size} bytes; accepted: up to {largest}. {fix}"
        )


def of_fields(
    task: Task, contract: Contract, inputs: Sequence[Any], chosen: Mapping[str, bool]
) -> int:
    """Bytes of the fields of all answers. chosen: by name, whether it is binary; a name that is not
    among the task's tensors is the whole answer as JSON."""
    tensors, rows, size = task.tensors(contract), len(inputs), 0
    names = sum(map(len, contract.labels or ()))
    for name, binary in chosen.items():
        if name in tensors:
            dtype, shape = tensors[name]
            size += answer_bytes(datatype(dtype), rows * prod(shape), binary)
            size += rows * ESCAPED * names if dtype == "object" else 0
            continue
        size += JSON_NUMBER * rows * sum(prod(shape) for _, shape in tensors.values())
        size += rows * (ENTRY + ESCAPED * names)
        if task.per_position and task.classifies:
            for text in map(task.inputs.extent, inputs):
                positions = min(text, contract.longest)
                size += 2 * (positions * (ENTRY + ESCAPED * names) + ESCAPED * text)
    return size


def of_tensors(contract: Contract, arrays: Mapping[str, Array], chosen: Mapping[str, bool]) -> int:
    """Bytes of a model's outputs for raw inputs. The model computes outputs that are not chosen as
    well: they count as binary. An axis that no input has counts as 1."""
    axes: dict[str | int, int] = {}
    for spec in contract.inputs:
        if spec.name in arrays:
            axes |= dict(zip(spec.axes, arrays[spec.name].shape, strict=False))
    size = 0
    for spec in contract.outputs:
        count = prod(a if isinstance(a, int) else axes.get(a, 1) for a in spec.axes)
        size += answer_bytes(datatype(spec.dtype), count, chosen.get(spec.name, True))
    return size
