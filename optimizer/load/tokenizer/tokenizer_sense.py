"""Can this tokenizer tell one text from another, in ids that the embedding has?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError

SPACES = "▁Ġ"  # how SentencePiece and byte-level BPE write a space


def check(tokenizer: Any, rows: int, folder: Path, texts: Sequence[str]) -> None:
    """Raise CheckpointError for a tokenizer of special tokens alone, for one with more entries or
    higher ids than the embedding has rows, and for one that gives such an id.

    tokenizer: transformers', a fast one. texts: any.
    """
    _has_words(tokenizer, folder)
    vocabulary: dict[str, int] = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    token, highest = max(vocabulary.items(), key=lambda item: item[1])
    if max(highest, len(vocabulary) - 1) >= rows:
        raise CheckpointError(
            f"the tokenizer does not fit: it has {len(vocabulary)} entries, token {token!r} has id "
            f"{highest}, and the embedding has {rows} rows",
            where=str(folder / "tokenizer.json"),
            fix="Use the tokenizer the model was trained with, or resize the embedding.",
        )
    for text in texts:
        beyond = [i for i in tokenizer(text)["input_ids"] if not 0 <= i < rows]
        if beyond:
            raise CheckpointError(
                f"the tokenizer gives id {beyond[0]} for {text[:40]!r}, and the embedding has "
                f"{rows} rows",
                where=str(folder / "tokenizer.json"),
                fix="Use the tokenizer the model was trained with: its post_processor puts ids "
                "around a text that are not in its vocabulary.",
            )


def _has_words(tokenizer: Any, folder: Path) -> None:
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
    if any(token.strip(SPACES) and token not in special for token in vocabulary):
        return
    named = ", ".join(sorted(vocabulary, key=vocabulary.__getitem__)[:6])
    raise CheckpointError(
        f"the tokenizer ({type(tokenizer).__name__}) has {len(vocabulary)} entries and all are "
        f"special tokens ({named}{', …' if len(vocabulary) > 6 else ''}): every text becomes the "
        "same tokens. transformers makes such a one up when it does not find the vocabulary",
        where=str(folder),
        fix="Copy the tokenizer's files from the model that this one was fine-tuned from.",
    )
