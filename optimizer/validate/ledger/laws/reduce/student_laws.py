"""The hop `reduce` of a student: check that it is a complete model with the reference's interface.

compared   the student's checkpoint, tokenizer and contract with the reference's
limit      none: equal, except the sizes of its own KV cache and vectors
caught     another tokenizer, vocabulary or contract, a tensor missing:
           test_a_planted_fault_is_named_at_the_hop

 1. complete   transformers builds and fills the model from its checkpoint, nothing missing or left
               over
 2. tokenizer  the same tokenizer, byte for byte, and the same vocabulary size
 3. contract   the same inputs, outputs and options

No part of a student is cut out of the reference, so no law of structure can judge its weights. The
entry reports that, and the gates of the task judge what it learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.laws.reduce.structure_laws import START, find_unloaded
from optimizer.validate.materials import Materials

WHY = "the student reads and answers as the reference does"
UNPROVEN = (
    "no part of a student is cut out of the reference, so no law of structure holds for its "
    "weights; the task's gates judge what it learned"
)
STUDENT_SIZES = ("layers", "kv_heads", "head_dim")  # of a decoder's KV cache


def reduce(m: Materials) -> LedgerEntry:
    """Hop `reduce` of a student: compare it, before it is trained, with the reference by laws 1 to
    3."""
    assert m.smaller is not None
    problems = (*_tokens(m.smaller, m), *_contract(m.smaller, m), *find_unloaded(m))
    measured = None if problems else _apart(m)
    unproven = "" if problems else UNPROVEN
    return LedgerEntry("reduce", START, None, measured, not problems, WHY, problems, unproven)


def _apart(m: Materials) -> Distance | None:
    """Measure the distance of the untrained student's outputs to the reference's; None where their
    shapes differ."""
    before = [trace.trace_run(m.reference_model, b, m.outputs, ()) for b in m.batches]
    after = [trace.run(m.smaller_model, b, m.outputs) for b in m.batches]
    shapes = ({n: a.shape for n, a in answers.items()} for answers in (after[0], before[0].result))
    return m.output_distance(after, before) if len({str(s) for s in shapes}) == 1 else None


def _tokens(student: Path, m: Materials) -> Iterator[str]:
    """Check law 2: return a problem for each tokenizer file, and for a vocabulary size, of the
    student that differs from the reference's."""
    file = f"checkpoint/{m.contract.text.file}"
    if (student / file).read_bytes() != (m.reference / file).read_bytes():
        yield f"{file}: differs from the reference's"
    rows = [
        read_json(f / "checkpoint" / "config.json")["vocab_size"] for f in (student, m.reference)
    ]
    if rows[0] != rows[1]:
        yield f"config.json: vocab_size is {rows[0]}; the reference's is {rows[1]}"


def _contract(student: Path, m: Materials) -> Iterator[str]:
    """Check law 3: return a problem for each field of the student's contract that differs from the
    reference's."""
    actual, expected = (read_json(folder / "contract.json") for folder in (student, m.reference))
    for contract in (actual, expected):
        for name in STUDENT_SIZES:
            (contract.get("generation") or {}).pop(name, None)
        for output in contract["outputs"]:
            output["axes"] = (
                _named_axes(output["axes"]) if contract.get("pooling") else output["axes"]
            )
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            yield f"contract.json: {name} differs from the reference's"


def _named_axes(axes: list[Any]) -> list[Any]:
    """Return the axes of an output that law 3 compares without the width of vectors, which may
    differ in a student."""
    return [axis for axis in axes if isinstance(axis, str)]
