"""What a tokenizer makes of a data set: can the model tell its texts apart?

A tokenizer of another language, or none at all, turns most texts into unknown tokens, and texts of
the same length into the same tokens. Every later comparison then holds, and means nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.text import TextTokenizer

CHUNK = 1000  # texts tokenized at a time
FEWEST = 3  # token rows: one alone, one beside it, and one that pads them (see Materials.batches)


@dataclass(frozen=True)
class TextSense:
    """texts: different ones. rows: different token rows of them, as the model gets them. shared:
    texts whose row is another text's too. tokens, unknown: of all texts, special tokens apart.
    all_unknown: texts without one known token; some_unknown: with an unknown one. cut: texts longer
    than the model takes, or the recipe. below_characters: texts with more tokens than characters
    that are not white space. sha256: of all token ids, in order."""

    texts: int
    rows: int
    shared: int
    tokens: int
    unknown: int
    all_unknown: int
    some_unknown: int
    cut: int
    below_characters: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    samples: Sequence[Sample], contract: Contract, tokenizer: Any, length: int | None = None
) -> TextSense:
    """What the tokens of `samples` are.

    tokenizer: as inputs.text.load_tokenizer opens it. length: tokens that a text is cut to besides
    the contract's max_length. Texts of text-generation are joined, so none of them is cut.
    """
    texts = list(dict.fromkeys((s.text, s.text_pair) for s in samples))
    unknown_id = _unknown_id(tokenizer)
    room = _room(contract, tokenizer, length)
    seen: Counter[bytes] = Counter()
    counts: Counter[str] = Counter()
    whole = hashlib.sha256()
    for text, ids in _token_rows(texts, tokenizer, room):
        kept = np.array(ids[:room], np.int64)
        row = kept.tobytes()
        seen[hashlib.blake2b(row, digest_size=16).digest()] += 1
        whole.update(len(row).to_bytes(8, "little") + row)
        unknown = int((kept == unknown_id).sum())
        counts["tokens"] += len(kept)
        counts["unknown"] += unknown
        counts["all_unknown"] += unknown == len(kept)
        counts["some_unknown"] += unknown > 0
        counts["cut"] += room is not None and len(ids) > room
        counts["below_characters"] += len(ids) > len("".join(text.split()))
    return TextSense(
        texts=len(texts),
        rows=len(seen),
        shared=sum(n for n in seen.values() if n > 1),
        sha256=whole.hexdigest(),
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


def _token_rows(
    texts: Sequence[tuple[str, str | None]], tokenizer: TextTokenizer, room: int | None
) -> Iterator[tuple[str, list[int]]]:
    """(text, its ids without special tokens); a pair is one text after the other. room: where so
    many tokens are all that counts, of a long text no more than its beginning is read."""
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
    """Tokens of a text, its special ones apart, that the model is given; None for no limit."""
    if tasks.of(contract).generates:
        return None
    limit = min(contract.text.max_length, length or contract.text.max_length)
    return max(limit - int(tokenizer.num_special_tokens_to_add(False)), 0)


def _unknown_id(tokenizer: Any) -> int:
    """The id of what is not in the vocabulary; -1 where everything is."""
    model = tokenizer.model
    if hasattr(model, "unk_token"):
        unknown = tokenizer.token_to_id(model.unk_token) if model.unk_token else None
    else:  # Unigram says it only in its document
        unknown = json.loads(tokenizer.to_str())["model"].get("unk_id")
    return -1 if unknown is None else int(unknown)


def check(sense: TextSense, name: str) -> None:
    """Raise DataError where the typical text has no known token, or where texts become the same
    tokens: fewer than three different rows (or one per text), or most texts share theirs.

    name: the place of the data in the recipe.
    """
    fix = "Is the tokenizer the model's own, and are the texts in a language it was made for?"
    if 2 * sense.all_unknown > sense.texts:
        raise DataError(
            f"{sense.all_unknown} of {sense.texts} texts have no token that the tokenizer knows "
            f"({sense.unknown} of all {sense.tokens} tokens are unknown)",
            where=f"{name} data",
            accepted="texts of which most have a known token",
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
            f"the model cannot tell them apart ({sense.unknown} of {sense.tokens} tokens are "
            f"unknown{more})",
            where=f"{name} data",
            accepted="texts of which most have tokens of their own",
            fix=fix + (" Texts that begin alike need a longer max_length." if sense.cut else ""),
        )


def warnings(sense: TextSense, name: str) -> list[str]:
    """A sentence for each thing that is odd of most texts, and forbids nothing."""
    counts = {
        "have a token that the tokenizer does not know": sense.some_unknown,
        "are longer than the model or the recipe takes, and are cut": sense.cut,
        "become more tokens than they have characters: their language is not one that the "
        "tokenizer was made for": sense.below_characters,
    }
    return [
        f"{name} data: {count} of {sense.texts} texts {what}"
        for what, count in counts.items()
        if 2 * count > sense.texts
    ]
