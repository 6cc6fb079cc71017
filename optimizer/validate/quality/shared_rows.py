"""Count the rows that a model is both fitted to and judged on, by the digest of their inputs.

The digest is a sha256: of a text's token ids, not truncated; of the ids of both texts of a pair
that the model reads together; of the bytes of an image's file. The same rows are refused by
data/same_rows.py: check_disjoint; the two share no code.
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
from optimizer.recipe.stage_sections import ADAPTERS

FITTED = (
    *("calibrate", "reduce.calibrate", "reduce.recover.data", "qat.data"),
    "validate.train",
)
"""Sets to which ranges, scales, weights or a probe are fitted, by their place in the recipe."""
JUDGED = ("validate.data", "validate.also.", ADAPTERS)
"""Beginnings of the places of rows that gates judge."""


def count(
    data: Mapping[str, Sequence[Sample]], contract: Contract, encoder: Any
) -> dict[str, dict[str, int]]:
    """Count the report's `shared_rows`: {fitted set: {judged set: rows of the second that are in
    the first}}. Raises DataError where a number is not zero; no recipe can allow that.

    data: rows of every set by its place in the recipe
    encoder: encoder of the kind of input
    """
    digests = {name: _digests(rows, contract, encoder) for name, rows in data.items()}
    judged = [n for n in data if n.startswith(JUDGED)]
    shared: dict[str, dict[str, int]] = {}
    for fitted in [name for name in FITTED if name in data]:
        seen = set().union(*digests[fitted])
        shared[fitted] = {n: sum(not seen.isdisjoint(d) for d in digests[n]) for n in judged}
    for fitted, numbers in shared.items():
        for name, number in numbers.items():
            if number:
                raise DataError(
                    f"{number} of {len(data[name])} rows give the model the same input as rows of "
                    f"{fitted}",
                    where=name,
                    accepted="0: on rows that it was fitted to, a model looks better than it is",
                    fix="Take different rows: another split, file or seed.",
                )
    return shared


def _digests(rows: Sequence[Sample], contract: Contract, encoder: Any) -> list[set[bytes]]:
    if contract.tokenizer is None:
        return [{hashlib.sha256(_bytes(row)).digest()} for row in rows]
    firsts = encoder.ids([row.text for row in rows])
    seconds = encoder.ids([row.text_pair or "" for row in rows])
    digests = []
    for first, second in zip(firsts, seconds, strict=True):
        together = tasks.look_up(contract).pairs_together
        inputs = [(first, second)] if together else [(first,), (second,)] if second else [(first,)]
        digests.append({hashlib.sha256(repr(ids).encode()).digest() for ids in inputs})
    return digests


def _bytes(row: Sample) -> bytes:
    """Return the bytes by which a row that two evaluation sets share is recognised: those of the
    image's file, or of the repr of another input."""
    if row.image is None:
        return repr(row.input).encode()
    source = row.image.source
    return source.read_bytes() if isinstance(source, Path) else source
