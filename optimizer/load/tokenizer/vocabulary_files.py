"""Check that a tokenizer was built from the vocabulary files of its folder.

If the folder has none of the files that the tokenizer's class declares, transformers raises no
error: it builds a tokenizer of a few special tokens, and every text becomes [CLS] [UNK] [SEP].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.progress import say

TOKENIZER_JSON = "tokenizer.json"  # has the vocabulary too; every class reads it
NAMES = (
    TOKENIZER_JSON,
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
)


def check(tokenizer: Any, folder: Path) -> None:
    """Raise CheckpointError where the tokenizer of `folder` read no vocabulary file, or where it
    gives more than half of an unread file's tokens another id or none; with fewer, report them."""
    present = [name for name in NAMES if (folder / name).is_file()]
    read = list_files_read(tokenizer, folder)
    unread = [name for name in present if name not in read]
    name = type(tokenizer).__name__
    if not read:
        raise CheckpointError(
            f"{name}, AutoTokenizer's choice, read no vocabulary (the folder has "
            f"{', '.join(unread) or 'none'}), and transformers made up a tokenizer of "
            f"{len(tokenizer)} entries",
            where=str(folder),
            accepted=f"files that {name} reads: {', '.join(list_declared_files(tokenizer))}",
            fix="Save the model's tokenizer here as tokenizer.json (save_pretrained of the right "
            'class), or name that class: "tokenizer_class" in tokenizer_config.json.',
        )
    for file in unread:
        entries = _entries(folder / file)
        if entries:
            _compare_vocabulary(entries, tokenizer, folder / file, read)


def list_declared_files(tokenizer: Any) -> list[str]:
    """The names of vocabulary files that the tokenizer's class reads."""
    names = {str(n) for key, n in type(tokenizer).vocab_files_names.items() if "config" not in key}
    return [TOKENIZER_JSON, *sorted(names - {TOKENIZER_JSON})]


def list_files_read(tokenizer: Any, folder: Path) -> list[str]:
    """The vocabulary files of the folder that the tokenizer was built from: tokenizer.json alone if
    it exists, else the files that its class declares or its arguments name."""
    if (folder / TOKENIZER_JSON).is_file():
        return [TOKENIZER_JSON]
    file_names = {Path(v).name for v in tokenizer.init_kwargs.values() if isinstance(v, str)}
    names = dict.fromkeys([*list_declared_files(tokenizer), *(n for n in NAMES if n in file_names)])
    return [name for name in names if (folder / name).is_file()]


def _entries(file: Path) -> dict[str, int]:
    """Read {token: id} from a source's vocabulary file in plain text; {} for any other format or a
    damaged file."""
    if file.name not in ("vocab.txt", "vocab.json"):
        return {}
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".txt":
            # readers strip lines differently, so tokens with white space are not compared
            lines = enumerate(text.split("\n"))
            return {line: i for i, line in lines if line and line == line.strip()}
        return {str(token): int(i) for token, i in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _compare_vocabulary(
    entries: Mapping[str, int], tokenizer: Any, file: Path, read: list[str]
) -> None:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    different = [t for t, i in entries.items() if vocabulary.get(t) != i]
    if not different:
        return
    difference = (
        f"{len(different)} of its {len(entries)} tokens have another id, or none, in "
        f"{', '.join(read)}, e.g. {different[0]!r} ({entries[different[0]]} here, "
        f"{vocabulary.get(different[0], 'absent')} there)"
    )
    if 2 * len(different) <= len(entries):
        say(f"load: {file}: {type(tokenizer).__name__} does not read it, and {difference}")
        return
    raise CheckpointError(
        f"{type(tokenizer).__name__}, AutoTokenizer's choice, does not read it, and it is another "
        f"vocabulary: {difference}",
        where=str(file),
        fix="Remove the file that the model was not trained with.",
    )
