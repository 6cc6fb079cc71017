"""The tokenizer as one file, tokenizer.json, proven to say what transformers says.

The harness reads that file with `tokenizers` alone; what was trained and measured with
transformers must come out of it token by token.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from optimizer.errors import CheckpointError
from optimizer.load.checkpoint import read_json

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
)
TEXTS = (
    "A plain sentence, in English.",
    "UPPER CASE, Café, naïve, 北京, 😀 and don't!",
    "numbers 1234567.89 and a veryveryverylongunbrokenwordwithoutanyspaces",
    "  two  spaces\tand a tab ",
    "",
)
PAIRS = (("a question?", "An answer."), ("", "only the second"))


def convert(source: Path, out: Path, embedding_rows: int, trust_remote_code: bool) -> Any:
    """Write out/tokenizer.json, without truncation or padding, and return transformers' own.

    Raises CheckpointError: no tokenizer, one that has no fast form, one with ids beyond the
    embedding, or one whose two readers disagree on a text.
    """
    present = [f for f in FILES if (source / f).is_file()]
    if not any(f not in ("tokenizer_config.json", "special_tokens_map.json") for f in present):
        raise CheckpointError(
            "no tokenizer",
            where=str(source),
            accepted="tokenizer.json, or the vocabulary that transformers makes one from",
            fix="Copy the tokenizer's files from the model that this one was fine-tuned from.",
        )
    theirs = _transformers_tokenizer(source, trust_remote_code)
    backend = theirs.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(out / "tokenizer.json"))
    _fits(backend, embedding_rows, source)
    _agrees(theirs, source, out / "tokenizer.json")
    return theirs


def _transformers_tokenizer(source: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # advice to those who tokenize with it; it goes in an error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = AutoTokenizer.from_pretrained(
                source, use_fast=True, trust_remote_code=trust_remote_code
            )
    except Exception as e:  # tokenizers raises bare Exception for a file it cannot parse
        raise CheckpointError(
            f"the tokenizer cannot be read ({' '.join(str(e).split())[:200]})",
            where=str(source),
            fix="Get tokenizer.json again, or save one with a fast tokenizer of transformers.",
        ) from e
    finally:
        logger.setLevel(level)
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"{type(tokenizer).__name__} has no fast form, so there is no tokenizer.json",
            where=str(source),
            fix="Save one where transformers can convert it (it may need sentencepiece).",
        )
    return tokenizer


def _fits(backend: Any, embedding_rows: int, source: Path) -> None:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    token, highest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if not vocabulary or highest >= embedding_rows:
        raise CheckpointError(
            f"the tokenizer does not fit: token {token!r} has id {highest} and the embedding has "
            f"{embedding_rows} rows",
            where=str(source / "tokenizer.json"),
            fix="Use the tokenizer the model was trained with, or resize the embedding.",
        )


def _agrees(theirs: Any, source: Path, file: Path) -> None:
    """The source's own tokenizer.json (or the written one) answers as transformers does."""
    from tokenizers import Tokenizer

    own = source / "tokenizer.json"
    for path in [file, *([own] if own.is_file() else [])]:
        ours = Tokenizer.from_file(str(path))
        ours.no_truncation()
        ours.no_padding()
        for text, pair in [*((t, None) for t in TEXTS), *PAIRS]:
            encoded = theirs(text, pair, add_special_tokens=True)
            encoding = ours.encode(text, pair, add_special_tokens=True)
            expected, found = encoded["input_ids"], encoding.ids
            if "token_type_ids" in encoded and encoding.type_ids != encoded["token_type_ids"]:
                expected, found = encoded["token_type_ids"], encoding.type_ids
            if found != expected:
                raise CheckpointError(
                    f"{path.name} gives {found[:8]} and transformers gives {expected[:8]} for "
                    f"{text[:40]!r}",
                    where=str(source),
                    fix="tokenizer.json and tokenizer_config.json are of different tokenizers: "
                    "save both again with transformers.",
                )


def max_length(source: Path, root: Path, positions: int | None) -> int | None:
    """The longest sequence in tokens: what the checkpoint says first (sentence_bert_config.json,
    then tokenizer_config.json), and never more than it has positions for."""
    said: list[Any] = []
    for folder, file, key in (
        (root, "sentence_bert_config.json", "max_seq_length"),
        (source, "sentence_bert_config.json", "max_seq_length"),
        (source, "tokenizer_config.json", "model_max_length"),
    ):
        if (folder / file).is_file():
            said.append(read_json(folder / file).get(key))
    # transformers writes 1e30 for "no limit"
    known = [int(n) for n in said if isinstance(n, int | float) and 2 <= n < 1_000_000]
    limits = [n for n in (known[:1] or []) + [positions] if n is not None]
    return min(limits) if limits else None
