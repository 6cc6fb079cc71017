"""sentence-embedding: one vector per text, pooled over the tokens that are not padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inputs.batch import Array, Batch
from ..inputs.text import TEXT
from .task import Task

if TYPE_CHECKING:
    from ..contract import Contract

SHOWN = 4  # numbers of an embedding that `predict` prints without --json
SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize's eps


def decode(contract: Contract, hidden: Array, mask: Array) -> Array:
    """Pool hidden (batch, sequence, width) with mask (batch, sequence) to (batch, width).

    Padding is on the right and the sum runs in sequence order, so padding adds exact zeros at the
    end and changes no bit of the result.
    """
    if contract.pooling == "cls":
        pooled = hidden[:, 0]
    else:
        total = np.where(mask[..., None], hidden, np.float32(0)).sum(axis=1)
        count = np.maximum(mask.sum(axis=1, keepdims=True), 1).astype(np.float32)
        pooled = total / count
    if contract.normalize:
        norm = np.sqrt(np.square(pooled).sum(axis=1, keepdims=True))
        pooled = pooled / np.maximum(norm, np.float32(SMALLEST_NORM))
    return np.ascontiguousarray(pooled)


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return {"embedding": floats} per text."""
    del contract, batch
    return [{"embedding": [float(x) for x in row]} for row in values]


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    (output,) = (o for o in contract.outputs if o.name == TASK.output)
    return {"embedding": ("float32", (int(output.axes[-1]),))}


def line(answer: Mapping[str, Any]) -> str:
    numbers = answer["embedding"]
    first = " ".join(f"{x:.4f}" for x in numbers[:SHOWN])
    return f"[{first} ...] {len(numbers)} numbers (--json prints all)"


TASK = Task(
    name="sentence-embedding",
    inputs=TEXT,
    output="last_hidden_state",
    axes=("batch", "sequence", "width"),
    metrics={
        "cosine": (),
        "probe_accuracy": (("label",),),
        "retrieval": (("text_pair",), ("label",)),
        "spearman": (("text_pair", "score"),),
    },
    decode=decode,
    answers=answers,
    line=line,
    tensors=tensors,
    arrays=("token_type_ids",),
    sections=("pooling", "normalize"),
    headless=True,
    pipeline_tag="sentence-similarity",
    not_in_browser="",
)
