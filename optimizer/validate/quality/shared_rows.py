"""The rows that a model is fitted to and judged on alike, counted by what the model is given.

An input is known by the sha256 of what the model gets of it: of a text its token ids (whole,
whatever the model's length), of a pair that a model reads together those of both, of an image the
bytes of its file. This counts what data/same_rows.py: check_disjoint refuses, and shares no code
with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.harness import tasks
from optimizer.harness.contract import Contract

FITTED = (
    *("calibrate", "reduce.calibrate", "reduce.recover.data", "qat.data"),
    "validate.train",
)
"""Sets that ranges, scales, weights or a probe are fitted to, by their place in the recipe."""
JUDGED, FURTHER = "validate.data", "validate.also."


def counted(
    data: Mapping[str, Sequence[Sample]], contract: Contract, encoder: Any
) -> dict[str, dict[str, int]]:
    """{fitted set: {judged set: rows of the second that are in the first}}, the report's
    `shared_rows`.

    data: the rows of every set by its place in the recipe. encoder: what the kind of input opened.
    Raises DataError where a number is not zero: a recipe has no way to allow that.
    """
    digests = {name: _digests(rows, contract, encoder) for name, rows in data.items()}
    judged = [n for n in data if n == JUDGED or n.startswith(FURTHER)]
    shared: dict[str, dict[str, int]] = {}
    for fitted in [name for name in FITTED if name in data]:
        known = set().union(*digests[fitted])
        shared[fitted] = {n: sum(not known.isdisjoint(d) for d in digests[n]) for n in judged}
    for fitted, numbers in shared.items():
        for name, number in numbers.items():
            if number:
                raise DataError(
                    f"{number} of {len(data[name])} rows are also in {fitted}, as the model reads "
                    "them",
                    where=name,
                    accepted="0: measured on what it was fitted to, a model looks better than it "
                    "is",
                    fix="Take different rows: another split, file or seed.",
                )
    return shared


def _digests(rows: Sequence[Sample], contract: Contract, encoder: Any) -> list[set[bytes]]:
    """Of each row the digests of its inputs."""
    if contract.tokenizer is None:
        return [{hashlib.sha256(_bytes(row)).digest()} for row in rows]
    firsts = encoder.ids([row.text for row in rows])
    seconds = encoder.ids([row.text_pair or "" for row in rows])
    digests = []
    for first, second in zip(firsts, seconds, strict=True):
        together = tasks.of(contract).pairs_together
        inputs = [(first, second)] if together else [(first,), (second,)] if second else [(first,)]
        digests.append({hashlib.sha256(repr(ids).encode()).digest() for ids in inputs})
    return digests


def _bytes(row: Sample) -> bytes:
    """Of the image's file; of an input of another kind, as it is written."""
    if row.image is None:
        return repr(row.input).encode()
    source = row.image.source
    return source.read_bytes() if isinstance(source, Path) else source
