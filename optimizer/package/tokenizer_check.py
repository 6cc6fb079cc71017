"""Check that the tokenizer in a bundle is the one that the model was judged with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.data import conversations
from optimizer.data.datasets import Sample
from optimizer.data.input_sense import text
from optimizer.foundation.errors import GateError
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.store import digest_file

FIX = "Run again with --remeasure: the store's folders were changed after validate read them."


def check(
    bundle: Path, contract: Contract, rows: Sequence[Sample], sense: Mapping[str, Any]
) -> None:
    """Raise GateError where a copy of the tokenizer's file differs from the one validate used, or
    gives other token ids; DataError as data/input_sense/text.py.

    rows: rows of validate.data
    sense: section `sense` of the report
    """
    name = contract.text.file
    for file in (bundle / "tokenizer" / name, *sorted(bundle.glob(f"model/*/{name}"))):
        if digest_file(file) != sense["tokenizer"]:
            raise GateError(
                "the file differs from the one that the model was judged with",
                where=str(file.relative_to(bundle)),
                fix=FIX,
            )
    tokenizer = load_tokenizer(bundle / "tokenizer", contract)
    rows = conversations.render(rows, contract, tokenizer)
    measured = text.measure(rows, contract, tokenizer)
    text.check(measured, "validate.data")
    if measured.sha256 != sense["texts"]["validate.data"]["sha256"]:
        raise GateError(
            f"the tokenizer gives other tokens for the {measured.texts} texts of validate.data "
            "than when the model was judged",
            where=f"tokenizer/{name}",
            fix=FIX,
        )
