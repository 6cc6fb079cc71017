"""Write the tokenizer as one file, tokenizer.json, after comparing its tokens with transformers'.

The harness reads that file with `tokenizers` alone.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.reading import read_text
from optimizer.harness.inputs import expansion
from optimizer.load.config.modules_json import locate_config
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
    """Write out/tokenizer.json without truncation or padding; return transformers' tokenizer.

    embedding_rows: rows of the model's embedding
    generates: True to compare decoded text too, and to allow the source's tokenizer.json other
        special tokens around a text (add_bos_token of tokenizer_config.json overrides it)

    Raises CheckpointError for a tokenizer that is missing, slow, without a vocabulary file, made of
    special tokens alone, with ids beyond the embedding, or read differently by `tokenizers`.
    """
    check_present(source)
    for name in (n for n in SETTINGS if (source / n).is_file()):
        read_text(source / name, SETTING_BYTES)
    tokenizer_fields.check(source)
    _check_expansion(source / "tokenizer.json")
    reference = open_tokenizer(source, trust_remote_code)
    vocabulary_files.check(reference, source)
    tokenizer_sense.check(reference, embedding_rows, source, TEXTS)
    backend = reference.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(out / "tokenizer.json"))
    _check_encoding(reference, source, out / "tokenizer.json")
    own = source / "tokenizer.json"
    if generates:
        _check_decoding(reference, source, out / "tokenizer.json")
    elif own.is_file():
        _check_encoding(reference, source, own)
    return reference


def check_present(source: Path) -> None:
    """Raise CheckpointError for a folder without a vocabulary."""
    present = [f for f in FILES if (source / f).is_file()]
    if not any(f not in ("tokenizer_config.json", "special_tokens_map.json") for f in present):
        raise CheckpointError(
            "no tokenizer",
            where=str(source),
            accepted="tokenizer.json, or a vocabulary that transformers can convert to it",
            fix="Copy the tokenizer's files from the model that this one was fine-tuned from.",
        )


def _check_expansion(file: Path) -> None:
    """Raise CheckpointError where the steps of a tokenizer.json can expand a text without limit."""
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


def open_tokenizer(source: Path, trust_remote_code: bool = False) -> Any:
    """Open transformers' fast tokenizer of a source's folder. Raises CheckpointError where it
    cannot open one."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                source, use_fast=True, trust_remote_code=trust_remote_code
            )
    except Exception as e:  # tokenizers raises Exception itself for a file it cannot parse
        raise CheckpointError(
            f"the tokenizer cannot be read ({' '.join(str(e).split())[:200]})",
            where=f"{source}: {', '.join(n for n in FILES if (source / n).is_file())}",
            fix="Get tokenizer.json again, or save one with a fast tokenizer of transformers.",
        ) from e
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"{type(tokenizer).__name__} has no fast version, so tokenizer.json cannot be written",
            where=str(source),
            fix="Save tokenizer.json where transformers and sentencepiece can convert it.",
        )
    return tokenizer


def _check_encoding(reference: Any, source: Path, file: Path) -> None:
    """Raise CheckpointError where a tokenizer.json `file` gives other ids than `reference`."""
    ours = _open_plain(file)
    for text, pair in [*((t, None) for t in TEXTS), *PAIRS]:
        encoded = reference(text, pair, add_special_tokens=True)
        encoding = ours.encode(text, pair, add_special_tokens=True)
        expected, ids = encoded["input_ids"], encoding.ids
        if "token_type_ids" in encoded and encoding.type_ids != encoded["token_type_ids"]:
            expected, ids = encoded["token_type_ids"], encoding.type_ids
        if ids != expected:
            alike = takewhile(lambda both: both[0] == both[1], zip(ids, expected, strict=False))
            shared = sum(1 for _ in alike)
            place, kind = slice(shared, shared + 8), type(reference).__name__
            raise CheckpointError(
                f"from token {shared} of {text[:40]!r} {file.name} gives {ids[place]}, and "
                f"transformers ({kind}) gives {expected[place]}",
                where=str(source),
                fix="tokenizer.json is of another tokenizer than tokenizer_config.json or "
                "config.json names: save the model's own with transformers' save_pretrained, which "
                "writes both files.",
            )


def _check_decoding(reference: Any, source: Path, file: Path) -> None:
    """Raise CheckpointError where `file`, the written tokenizer.json, decodes to another text than
    transformers' tokenizer, `reference`."""
    ours = _open_plain(file)
    for text in TEXTS:
        ids = reference(text)["input_ids"]
        expected = reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        decoded = ours.decode(ids, skip_special_tokens=True)
        if decoded != expected:
            raise CheckpointError(
                f"{file.name} decodes {ids[:8]} to {decoded[:40]!r} and transformers to "
                f"{expected[:40]!r}",
                where=str(source),
                fix="Save the tokenizer again with transformers.",
            )


def _open_plain(file: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_max_length(source: Path, root: Path, positions: int | None) -> int | None:
    """Maximum tokens of a sequence: sentence_bert_config.json's, else tokenizer_config.json's, at
    most `positions`; None for no limit. Raises CheckpointError for an invalid length."""
    lengths: list[int] = []
    for file, key in (
        (locate_config(root), "max_seq_length"),
        (locate_config(source), "max_seq_length"),
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
                fix="Correct it, or remove it to use the model's number of positions.",
            )
        if value < 1_000_000:  # transformers writes 1e30 for "no limit"
            lengths.append(int(value))
    limits = [n for n in (lengths[:1] or []) + [positions] if n is not None]
    return min(limits) if limits else None
