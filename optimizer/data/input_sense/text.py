"""Check that the texts of a data set still differ after tokenization.

A wrong tokenizer turns most texts into unknown tokens, and texts of equal length into equal tokens.
Every later comparison would then pass and prove nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optimizer.data.datasets import Sample
from optimizer.data.input_sense.record import FEWEST
from optimizer.foundation.errors import DataError
from optimizer.harness import tasks
from optimizer.harness.bounds import length_bounds
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.text import TextTokenizer

CHUNK = 1000  # texts tokenized at once


@dataclass(frozen=True)
class TextSense:
    """Counts over a data set's texts and their tokens, without special tokens."""

    texts: int  # different texts
    rows: int  # different rows of token ids, as the model gets them
    shared: int  # texts whose row equals another text's
    tokens: int
    unknown: int  # tokens
    all_unknown: int  # texts of unknown tokens alone
    some_unknown: int  # texts with an unknown token
    cut: int  # texts longer than the model or the recipe takes
    below_characters: int  # texts with more tokens than characters that are not white space
    sha256: str  # digest of all token ids, in order
    # {upper bound: rows} of the tokens of a row as the model gets it, in the bins of a server
    lengths: dict[str, int] = field(default_factory=dict)


def measure(
    samples: Sequence[Sample], contract: Contract, tokenizer: Any, length: int | None = None
) -> TextSense:
    """Count the tokens of `samples`, to see if the texts make sense to the tokenizer.

    tokenizer: result of inputs.text.load_tokenizer
    length: maximum tokens of a text, besides the contract's max_length; ignored for
        text-generation, whose texts are joined
    """
    texts = list(dict.fromkeys((s.text, s.text_pair) for s in samples))
    unknown_id = tokenizer.unknown_id
    room = _room(contract, tokenizer, length)
    seen: Counter[bytes] = Counter()
    counts: Counter[str] = Counter()
    digest = hashlib.sha256()
    for text, ids in _token_rows(texts, tokenizer, room):
        row_ids = np.array(ids[:room], np.int64)
        row = row_ids.tobytes()
        seen[hashlib.blake2b(row, digest_size=16).digest()] += 1
        digest.update(len(row).to_bytes(8, "little") + row)
        unknown = int((row_ids == unknown_id).sum())
        counts["tokens"] += len(row_ids)
        counts["unknown"] += unknown
        counts["all_unknown"] += unknown == len(row_ids)
        counts["some_unknown"] += unknown > 0
        counts["cut"] += room is not None and len(ids) > room
        counts["below_characters"] += len(ids) > len("".join(text.split()))
    return TextSense(
        texts=len(texts),
        rows=len(seen),
        shared=sum(n for n in seen.values() if n > 1),
        sha256=digest.hexdigest(),
        lengths=_lengths(samples, contract, tokenizer, length),
        **{
            name: counts[name]
            for name in (
                "tokens",
                "unknown",
                "all_unknown",
                "some_unknown",
                "cut",
                "below_characters",
            )
        },
    )


def _lengths(
    samples: Sequence[Sample], contract: Contract, tokenizer: Any, length: int | None
) -> dict[str, int]:
    """Return {length bound in tokens: rows up to it} of the rows that the model gets, with special
    tokens and prompt; {} for text-generation, whose texts are joined."""
    task = tasks.look_up(contract)
    if task.generates:
        return {}
    texts, pairs = [s.text for s in samples], [s.text_pair for s in samples]
    together = task.pairs_together and any(pairs)
    if not together:
        texts, pairs = [*texts, *(pair for pair in pairs if pair is not None)], []
    bounds = length_bounds(tasks.longest(contract))
    limit = None if length is None else min(length, bounds[-1])
    counts: Counter[int] = Counter()
    for start in range(0, len(texts), CHUNK):
        part = slice(start, start + CHUNK)
        second = pairs[part] if together else None
        rows = task.inputs.encode(contract, tokenizer, texts[part], second, limit)
        sizes = (one.size for row in rows for one in row.parts)
        counts.update(bounds[bisect_left(bounds, size)] for size in sizes)
    return {str(bound): counts[bound] for bound in sorted(counts)}


def _token_rows(
    texts: Sequence[tuple[str, str | None]], tokenizer: TextTokenizer, room: int | None
) -> Iterator[tuple[str, list[int]]]:
    """Yield (text, token ids without special tokens) for each text; the two texts of a pair are
    joined.

    room: maximum tokens that count, so that only the beginning of a longer text is tokenized; None:
        all
    """
    for start in range(0, len(texts), CHUNK):
        part = [
            [t if room is None else tokenizer.head(t, room + 1) for t in (text, pair or "")]
            for text, pair in texts[start : start + CHUNK]
        ]
        firsts = tokenizer.ids([text for text, _ in part])
        seconds = tokenizer.ids([pair for _, pair in part])
        for (text, pair), first, second in zip(part, firsts, seconds, strict=True):
            yield text + pair, first + second


def _room(contract: Contract, tokenizer: Any, length: int | None) -> int | None:
    """Return the maximum tokens of a text, without special tokens and prompt; None for no limit."""
    task = tasks.look_up(contract)
    if task.generates or (task.extracts and length is None):  # windows read all of a context
        return None
    limit = min(contract.text.max_length, length or contract.text.max_length)
    (before,) = tokenizer.ids([contract.vectors.text])
    return max(limit - int(tokenizer.num_special_tokens_to_add(False)) - len(before), 0)


def check(sense: TextSense, name: str) -> None:
    """Raise DataError where more than half of the texts are only unknown tokens or have the same
    tokens as another text, or where fewer than min(FEWEST, number of texts) texts have different
    tokens.

    name: place of the data in the recipe, for messages
    """
    fix = (
        "If the model was trained with another tokenizer, save that one in its folder with "
        "save_pretrained (docs/tutorial.md, section 1); else bring texts that it knows."
    )
    if 2 * sense.all_unknown > sense.texts:
        raise DataError(
            f"{sense.all_unknown} of {sense.texts} texts have no token that the tokenizer knows "
            f"({sense.unknown} of all {sense.tokens} tokens are unknown)",
            where=f"{name} data",
            accepted="texts most of which have a known token",
            fix=fix,
        )
    if sense.rows < min(FEWEST, sense.texts):
        raise DataError(
            f"{sense.texts} different texts become {sense.rows} different rows of tokens",
            where=f"{name} data",
            accepted=f"{min(FEWEST, sense.texts)} different rows or more",
            fix=fix,
        )
    if 2 * sense.shared > sense.texts:
        more = f"; {sense.cut} texts are cut" if sense.cut else ""
        raise DataError(
            f"{sense.shared} of {sense.texts} different texts have the tokens of another text, so "
            f"the model cannot distinguish them ({sense.unknown} of {sense.tokens} tokens are "
            f"unknown{more})",
            where=f"{name} data",
            accepted="texts most of which differ in tokens",
            fix=fix + (" Texts that begin alike need a longer max_length." if sense.cut else ""),
        )


def write_warnings(sense: TextSense, name: str) -> list[str]:
    """Return one sentence for each oddity that more than half of the texts have: an unknown token,
    tokens that are cut off, more tokens than characters."""
    counts = {
        "have a token that the tokenizer does not know": sense.some_unknown,
        "are longer than the model or the recipe takes, and are cut": sense.cut,
        "have more tokens than characters: the tokenizer was not made for their language": (
            sense.below_characters
        ),
    }
    return [
        f"{name} data: {count} of {sense.texts} texts {what}"
        for what, count in counts.items()
        if 2 * count > sense.texts
    ]
