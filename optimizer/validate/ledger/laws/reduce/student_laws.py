"""The hop `reduce` of a student: is it a whole model that stands in the reference's place?

 1. transformers builds and fills the model from its checkpoint, nothing missing or left over;
 2. it reads texts as the reference does: the same tokenizer, byte for byte, and as many tokens;
 3. it is asked and answers as the contract of the reference says, but for the sizes of its own
    cache and vectors.

Nothing of it was cut out of the reference, so no law of structure can say whether its weights are
right: the entry says so, and the gates of the task judge what it learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.entry import Entry
from optimizer.validate.ledger.laws.reduce.structure_laws import START, loaded
from optimizer.validate.materials import Materials

WHY = "the student reads and answers as the reference does"
UNPROVEN = (
    "nothing of a student is cut out of the reference, so no law of structure holds for its "
    "weights; the task's gates judge what it learned"
)
OWN = ("layers", "kv_heads", "head_dim")  # of a decoder's cache


def reduce(m: Materials) -> Entry:
    """The student against the reference, before it learns anything."""
    assert m.smaller is not None
    problems = (*_tokens(m.smaller, m), *_contract(m.smaller, m), *loaded(m))
    measured = None if problems else _apart(m)
    unproven = "" if problems else UNPROVEN
    return Entry("reduce", START, None, measured, not problems, WHY, problems, unproven)


def _apart(m: Materials) -> Distance | None:
    """None where the answers are of other widths."""
    before = [trace.traced(m.reference_model, b, m.outputs, ()) for b in m.batches]
    after = [trace.run(m.smaller_model, b, m.outputs) for b in m.batches]
    shapes = ({n: a.shape for n, a in answers.items()} for answers in (after[0], before[0].result))
    return m.output_distance(after, before) if len({str(s) for s in shapes}) == 1 else None


def _tokens(student: Path, m: Materials) -> Iterator[str]:
    """Law 2."""
    file = f"checkpoint/{m.contract.text.file}"
    if (student / file).read_bytes() != (m.reference / file).read_bytes():
        yield f"{file}: differs from the reference's"
    rows = [
        read_json(f / "checkpoint" / "config.json")["vocab_size"] for f in (student, m.reference)
    ]
    if rows[0] != rows[1]:
        yield f"config.json: vocab_size is {rows[0]}, and {rows[1]} in the reference"


def _contract(student: Path, m: Materials) -> Iterator[str]:
    """Law 3."""
    own, theirs = (read_json(folder / "contract.json") for folder in (student, m.reference))
    for contract in (own, theirs):
        for name in OWN:
            (contract.get("generation") or {}).pop(name, None)
        for output in contract["outputs"]:
            output["axes"] = _named(output["axes"]) if contract.get("pooling") else output["axes"]
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            yield f"contract.json: {name} is other than the reference's"


def _named(axes: list[Any]) -> list[Any]:
    """Without the width of vectors, which may be a student's own."""
    return [axis for axis in axes if isinstance(axis, str)]
