"""Check that a tokenizer distinguishes texts, with ids that the embedding has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError

SPACES = "▁Ġ"  # spaces of SentencePiece and byte-level BPE


def check(tokenizer: Any, rows: int, folder: Path, texts: Sequence[str]) -> None:
    """Raise CheckpointError for a tokenizer of special tokens alone, or with ids beyond the
    embedding's `rows`, in its vocabulary or for one of `texts`. tokenizer: a fast one."""
    _has_words(tokenizer, folder)
    vocabulary: dict[str, int] = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    token, highest = max(vocabulary.items(), key=lambda item: item[1])
    if max(highest, len(vocabulary) - 1) >= rows:
        raise CheckpointError(
            f"the tokenizer does not fit: it has {len(vocabulary)} entries and token {token!r} has "
            f"id {highest}, but the embedding has {rows} rows",
            where=str(folder / "tokenizer.json"),
            fix="Use the tokenizer the model was trained with, or resize the embedding.",
        )
    for text in texts:
        beyond = [i for i in tokenizer(text)["input_ids"] if not 0 <= i < rows]
        if beyond:
            raise CheckpointError(
                f"the tokenizer gives id {beyond[0]} for {text[:40]!r}, but the embedding has "
                f"{rows} rows",
                where=str(folder / "tokenizer.json"),
                fix="Use the tokenizer the model was trained with: the post_processor of this one "
                "adds ids that are not in its vocabulary.",
            )


def _has_words(tokenizer: Any, folder: Path) -> None:
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
    if any(token.strip(SPACES) and token not in special for token in vocabulary):
        return
    first_entries = ", ".join(sorted(vocabulary, key=vocabulary.__getitem__)[:6])
    raise CheckpointError(
        f"the tokenizer ({type(tokenizer).__name__}) has {len(vocabulary)} entries and all are "
        f"special tokens ({first_entries}{', …' if len(vocabulary) > 6 else ''}), so every text "
        "becomes the same tokens; transformers makes such a tokenizer when it finds no vocabulary",
        where=str(folder),
        fix="Copy the tokenizer's files from the model that this one was fine-tuned from.",
    )
