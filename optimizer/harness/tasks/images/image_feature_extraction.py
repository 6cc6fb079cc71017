"""image-feature-extraction: one vector per image, for retrieval or a linear probe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...inputs.batch import Array, Batch
from ...inputs.image import IMAGE
from ..task import Task
from . import NOT_IN_BROWSER

if TYPE_CHECKING:
    from ...contract import Contract


def decode(contract: Contract, hidden: Array, real: Array) -> Array:
    """Pool an image model's hidden states (batch, positions, width) to (batch, width) by
    contract.pooling: "cls" takes the first position, "mean" averages all."""
    del real
    return hidden[:, 0] if contract.pooling == "cls" else hidden.mean(axis=1)


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the task's answers, {"features": a list of floats} per image."""
    del contract, batch
    return [{"features": [float(x) for x in row]} for row in values]


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {field of an image's answer: (dtype, shape per input)} for servers that send
    arrays."""
    (output,) = (o for o in contract.outputs if o.name == TASK.output)
    return {"features": ("float32", (int(output.axes[-1]),))}


def line(answer: Mapping[str, Any]) -> str:
    """Return an image's features as text for a person."""
    row = answer["features"]
    shown = " ".join(f"{x:+.4f}" for x in row[:8])
    return f"{shown}{' ...' if len(row) > 8 else ''}  ({len(row)} numbers; --json prints all)"


TASK = Task(
    name="image-feature-extraction",
    inputs=IMAGE,
    output="last_hidden_state",
    axes=("batch", "positions", "width"),
    metrics={
        "cosine": (),
        "probe_accuracy": (("label",),),
        "retrieval": (("label",),),
    },
    decode=decode,
    answers=answers,
    line=line,
    tensors=tensors,
    sections=("pooling",),
    headless=True,
    not_in_browser=NOT_IN_BROWSER,
)
