"""The inputs that the ledger's other batches do not reach: one text as long as the model takes, and
one batch of many rows of unequal lengths. Graphs and the harness run them whole, never in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Batch
from optimizer.recipe.targets import TargetSection
from optimizer.validate.ledger import decoder_batches

LONGEST = 512  # tokens of a text: correct runs are made of it, and attention grows with its square
ROWS = 32
WIDTHS = range(4, 17)  # tokens of the rows, one length after the other


@dataclass(frozen=True)
class Limits:
    """tokens: length of the longest text; rows: size of the largest batch."""

    tokens: int = LONGEST
    rows: int = ROWS

    @classmethod
    def of(cls, target: TargetSection) -> Limits:
        """Within what one of the target's profiles takes, where it has any."""
        profiles = target.profiles
        return cls(
            min(LONGEST, max((p.sequence[2] for p in profiles), default=LONGEST)),
            min(ROWS, max((p.batch[2] for p in profiles), default=ROWS)),
        )


def make(
    texts: Sequence[Any], contract: Contract, encoder: Any, bytes_per_token: float, limits: Limits
) -> list[Batch]:
    """[the batch of many rows, the longest text]; nothing for inputs of one size, all of which are
    in one of their other batches.

    bytes_per_token: size of a trace by tokens, which bounds a decoder's longest text.
    """
    if tasks.of(contract).generates:
        longest = min(limits.tokens, decoder_batches.longest_of(bytes_per_token))
        return decoder_batches.extremes(texts, contract, encoder, longest, limits.rows)
    kind = tasks.of(contract).inputs
    if not kind.size:
        return []
    most = min(limits.tokens, tasks.longest(contract))
    ends = [min(WIDTHS[i % len(WIDTHS)], most) for i in range(limits.rows)]
    rows = [_beginning(contract, encoder, t, n) for t, n in zip(cycle(texts), ends, strict=False)]
    many = [row for row in kind.encode(contract, encoder, rows) if not row.problem]
    longest_text = kind.encode(contract, encoder, [overlong(contract, texts)], None, most)
    return [kind.collate(contract, many), kind.collate(contract, longest_text)]


def overlong(contract: Contract, texts: Sequence[Any]) -> Any:
    """Join texts to one of more tokens than the model takes, or than LONGEST."""
    words = min(LONGEST, tasks.longest(contract)) + 1  # each of which is a token or more
    return tasks.of(contract).inputs.lengthened(cycle(texts), words)


def _beginning(contract: Contract, encoder: Any, text: str, tokens: int) -> str:
    """The part of a text that its first `tokens` tokens come from, special tokens included."""
    (encoded,) = tasks.of(contract).inputs.encode(contract, encoder, [text], None, tokens)
    return text[: max(end for _, end in encoded.encoding.offsets)] or text


def unseen(batches: Sequence[Batch], extremes: Sequence[Batch], contract: Contract) -> str:
    """Name the lengths and sizes of batches that no hop runs."""
    kind = tasks.of(contract).inputs
    parts = []
    if kind.size:
        limit = (
            contract.decoder.context if tasks.of(contract).generates else tasks.longest(contract)
        )
        usual = max(int(b.real.sum(1).max()) for b in batches)
        longest = max([usual, *(int(b.real.sum(1).max()) for b in extremes)])
        if longest > usual + 1:
            parts.append(f"{kind.name}s of {usual + 1} to {longest - 1} {kind.size}")
        if limit > longest:
            parts.append(f"{kind.name}s of {longest + 1} to {limit} {kind.size}")
    rows = max(b.rows for b in (*batches, *extremes))
    parts.append(f"batches of more than {rows} {kind.name}s")
    return f"not looked at: {'; '.join(parts)}"
