"""feature-extraction: the hidden state of every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...inputs.batch import Array, Batch
from ...inputs.text import TEXT
from ..task import Task, clear_padding

if TYPE_CHECKING:
    from ...contract import Contract


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of feature extraction, {"hidden_states": a list of (tokens, width) floats}
    per text, without padding."""
    del contract
    kept = [values[i][: len(e.ids)] for i, e in enumerate(batch.encodings)]
    return [{"hidden_states": [[float(x) for x in row] for row in rows]} for rows in kept]


def line(answer: Mapping[str, Any]) -> str:
    """Write an answer of feature extraction in one line for a person: the number of tokens and of
    numbers per token."""
    rows = answer["hidden_states"]
    return f"{len(rows)} tokens x {len(rows[0])} numbers (--json prints all)"


TASK = Task(
    name="feature-extraction",
    inputs=TEXT,
    output="last_hidden_state",
    axes=("batch", "sequence", "width"),
    metrics={"cosine": ()},
    decode=clear_padding,
    answers=answers,
    line=line,
    arrays=("token_type_ids",),
    headless=True,
    not_in_browser="",
)
