"""The inputs that the ledger's other batches do not reach: one text as long as the model takes, and
one batch of many rows of unequal lengths. Graphs and the harness are asked them whole, never in
pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Batch
from optimizer.validate.ledger import decoder_batches

LONGEST = 512  # tokens of a text: correct runs are made of it, and attention grows with its square
ROWS = 32
WIDTHS = range(4, 17)  # tokens of the rows, one length after the other


def make(
    texts: Sequence[Any], contract: Contract, encoder: Any, bytes_per_token: float
) -> list[Batch]:
    """[the batch of many rows, the longest text]; nothing for inputs of one size, all of which are
    in one of their other batches.

    bytes_per_token: what a trace keeps of a token; how long a decoder's text is follows from it.
    """
    if contract.task_record.generates:
        return decoder_batches.extremes(texts, contract, encoder, bytes_per_token, ROWS)
    kind = contract.task_record.inputs
    if not kind.size:
        return []
    ends = [min(WIDTHS[i % len(WIDTHS)], contract.longest) for i in range(ROWS)]
    rows = [_beginning(contract, encoder, t, n) for t, n in zip(cycle(texts), ends, strict=False)]
    many = [row for row in kind.encode(contract, encoder, rows) if not row.problem]
    long = overlong(contract, texts)
    longest = kind.encode(contract, encoder, [long], None, min(LONGEST, contract.longest))
    return [kind.collate(contract, many), kind.collate(contract, longest)]


def overlong(contract: Contract, texts: Sequence[Any]) -> Any:
    """Texts joined to one that has more tokens than the model takes, or than are looked at."""
    words = min(LONGEST, contract.longest) + 1  # each of which is a token or more
    return contract.task_record.inputs.lengthened(cycle(texts), words)


def _beginning(contract: Contract, encoder: Any, text: str, tokens: int) -> str:
    """The part of a text that its first `tokens` tokens come from, special tokens included."""
    (encoded,) = contract.task_record.inputs.encode(contract, encoder, [text], None, tokens)
    return text[: max(end for _, end in encoded.encoding.offsets)] or text


def unseen(batches: Sequence[Batch], extremes: Sequence[Batch], contract: Contract) -> str:
    """The lengths and sizes of batches that no hop is asked, in words."""
    kind = contract.task_record.inputs
    parts = []
    if kind.size:
        limit = contract.decoder.context if contract.task_record.generates else contract.longest
        usual, longest = (
            max((int(b.real.sum(1).max()) for b in group), default=0)
            for group in (batches, extremes)
        )
        if longest > usual + 1:
            parts.append(f"{kind.name}s of {usual + 1} to {longest - 1} {kind.size}")
        if limit > longest:
            parts.append(f"{kind.name}s of {longest + 1} to {limit} {kind.size}")
    rows = max(b.rows for b in (*batches, *extremes))
    parts.append(f"batches of more than {rows} {kind.name}s")
    return f"not looked at: {'; '.join(parts)}"
