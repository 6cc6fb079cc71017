"""The tokenizer as one file, tokenizer.json, proven to say what transformers says.

The harness reads that file with `tokenizers` alone; what was trained and measured with
transformers must come out of it token by token.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.reading import read_text
from optimizer.harness.inputs import expansion
from optimizer.load.tokenizer import tokenizer_fields, tokenizer_sense, vocabulary_files
from optimizer.model.checkpoint.checkpoint import read_json

FILES = (
    *vocabulary_files.NAMES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
SETTING_BYTES = 50_000_000
TEXTS = (
    "A plain sentence, in English.",
    "UPPER CASE, Café, naïve, 北京, 😀 and don't!",
    "numbers 1234567.89 and a veryveryverylongunbrokenwordwithoutanyspaces",
    "  two  spaces\tand a tab ",
    "",
)
PAIRS = (("a question?", "An answer."), ("", "only the second"))


def convert(
    source: Path, out: Path, embedding_rows: int, trust_remote_code: bool, generates: bool = False
) -> Any:
    """Write out/tokenizer.json, without truncation or padding, and return transformers' own.

    generates: the tokens are also turned back into text, which is then compared too; and the
    source's own tokenizer.json may differ in the tokens put around a text (add_bos_token in
    tokenizer_config.json decides about them, and transformers writes them into the new file).
    Raises CheckpointError: no tokenizer, one that has no fast form, one that no vocabulary file
    was read for, one of special tokens alone, one with ids beyond the embedding, or one whose two
    readers disagree on a text.
    """
    present = [f for f in FILES if (source / f).is_file()]
    if not any(f not in ("tokenizer_config.json", "special_tokens_map.json") for f in present):
        raise CheckpointError(
            "no tokenizer",
            where=str(source),
            accepted="tokenizer.json, or the vocabulary that transformers makes one from",
            fix="Copy the tokenizer's files from the model that this one was fine-tuned from.",
        )
    for name in (n for n in SETTINGS if (source / n).is_file()):
        read_text(source / name, SETTING_BYTES)
    tokenizer_fields.check(source)
    _check_expansion(source / "tokenizer.json")
    theirs = transformers_tokenizer(source, trust_remote_code)
    vocabulary_files.check(theirs, source)
    tokenizer_sense.check(theirs, embedding_rows, source, TEXTS)
    backend = theirs.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(out / "tokenizer.json"))
    _agrees(theirs, source, out / "tokenizer.json")
    own = source / "tokenizer.json"
    if generates:
        _decodes(theirs, source, out / "tokenizer.json")
    elif own.is_file():
        _agrees(theirs, source, own)
    return theirs


def _check_expansion(file: Path) -> None:
    """Raise CheckpointError where the steps of a tokenizer.json make a text too long to hold."""
    if not file.is_file():
        return
    over = expansion.find_excess(read_json(file))
    if over is not None:
        raise CheckpointError(
            over.problem,
            where=f"{file}: {over.field}",
            accepted=f"up to {over.accepted}",
            fix="Get the tokenizer that the model was trained with.",
        )


def transformers_tokenizer(source: Path, trust_remote_code: bool = False) -> Any:
    """The fast tokenizer of a folder. Raises CheckpointError where there is none."""
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
            where=f"{source}: {', '.join(n for n in FILES if (source / n).is_file())}",
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


def _agrees(theirs: Any, source: Path, file: Path) -> None:
    """A tokenizer.json (the source's own, or the written one) answers as transformers does."""
    ours = _plain(file)
    for text, pair in [*((t, None) for t in TEXTS), *PAIRS]:
        encoded = theirs(text, pair, add_special_tokens=True)
        encoding = ours.encode(text, pair, add_special_tokens=True)
        expected, ids = encoded["input_ids"], encoding.ids
        if "token_type_ids" in encoded and encoding.type_ids != encoded["token_type_ids"]:
            expected, ids = encoded["token_type_ids"], encoding.type_ids
        if ids != expected:
            raise CheckpointError(
                f"{file.name} gives {ids[:8]} and transformers gives {expected[:8]} for "
                f"{text[:40]!r}",
                where=str(source),
                fix="tokenizer.json and tokenizer_config.json are of different tokenizers: "
                "save both again with transformers.",
            )


def _decodes(theirs: Any, source: Path, file: Path) -> None:
    """The written tokenizer.json makes the text of tokens that transformers makes of them."""
    ours = _plain(file)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        decoded = ours.decode(ids, skip_special_tokens=True)
        if decoded != expected:
            raise CheckpointError(
                f"{file.name} decodes {ids[:8]} to {decoded[:40]!r} and transformers to "
                f"{expected[:40]!r}",
                where=str(source),
                fix="Save the tokenizer again with transformers.",
            )


def _plain(file: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def max_length(source: Path, root: Path, positions: int | None) -> int | None:
    """The longest sequence in tokens: what the checkpoint says first (sentence_bert_config.json,
    then tokenizer_config.json), and never more than it has positions for. Raises CheckpointError
    for what is not a length."""
    known: list[int] = []
    for file, key in (
        (root / "sentence_bert_config.json", "max_seq_length"),
        (source / "sentence_bert_config.json", "max_seq_length"),
        (source / "tokenizer_config.json", "model_max_length"),
    ):
        value = read_json(file).get(key) if file.is_file() else None
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 2:
            raise CheckpointError(
                f"{str(value)[:80]!r} was found",
                where=f"{file}: {key}",
                accepted="a number of tokens, 2 or more",
                fix="Correct it, or remove it: the model's positions are then the limit.",
            )
        if value < 1_000_000:  # transformers writes 1e30 for "no limit"
            known.append(int(value))
    limits = [n for n in (known[:1] or []) + [positions] if n is not None]
    return min(limits) if limits else None
