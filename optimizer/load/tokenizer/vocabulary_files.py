"""The vocabulary files of a checkpoint's folder, and which of them the tokenizer was made of.

transformers looks for the file names that its tokenizer class declares. Where none of them is in
the folder it raises nothing: it makes a tokenizer of a few special tokens, with which every text
becomes [CLS] [UNK] [SEP].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.progress import say

WHOLE = "tokenizer.json"  # holds a tokenizer with its vocabulary; every class reads it
NAMES = (
    WHOLE,
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
    """Raise CheckpointError where no vocabulary file of the folder was read, or where one that was
    not read is of another vocabulary: most of its tokens have another id, or none.

    tokenizer: transformers', made from `folder`. A second copy of the vocabulary that was read is
    usual (vocab.txt beside tokenizer.json). One that differs in fewer tokens is printed.
    """
    present = [name for name in NAMES if (folder / name).is_file()]
    read = files_read(tokenizer, folder)
    unread = [name for name in present if name not in read]
    name = type(tokenizer).__name__
    if not read:
        raise CheckpointError(
            f"{', '.join(unread) or 'no vocabulary file'} is there, and {name} (the tokenizer that "
            "AutoTokenizer chose) did not read it: transformers made up a tokenizer of "
            f"{len(tokenizer)} entries",
            where=str(folder),
            accepted=f"what {name} reads: {', '.join(declared(tokenizer))}",
            fix="Save the model's tokenizer here as tokenizer.json (save_pretrained of the right "
            'class does), or name that class: "tokenizer_class" in tokenizer_config.json.',
        )
    for file in unread:
        entries = _entries(folder / file)
        if entries:
            _same_vocabulary(entries, tokenizer, folder / file, read)


def declared(tokenizer: Any) -> list[str]:
    """The file names that the tokenizer's class reads a vocabulary from."""
    names = {str(n) for key, n in type(tokenizer).vocab_files_names.items() if "config" not in key}
    return [WHOLE, *sorted(names - {WHOLE})]


def files_read(tokenizer: Any, folder: Path) -> list[str]:
    """The vocabulary files of the folder that the tokenizer was made of: tokenizer.json alone where
    it is there, else what its class declares or says it was given."""
    if (folder / WHOLE).is_file():
        return [WHOLE]
    file_names = {Path(v).name for v in tokenizer.init_kwargs.values() if isinstance(v, str)}
    names = dict.fromkeys([*declared(tokenizer), *(n for n in NAMES if n in file_names)])
    return [name for name in names if (folder / name).is_file()]


def _entries(file: Path) -> dict[str, int]:
    """token -> id of a vocabulary in plain text; {} of any other format, or what is not one."""
    if file.name not in ("vocab.txt", "vocab.json"):
        return {}
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".txt":
            # the readers differ in what they strip from a line, so such tokens tell nothing
            lines = enumerate(text.split("\n"))
            return {line: i for i, line in lines if line and line == line.strip()}
        return {str(token): int(i) for token, i in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _same_vocabulary(
    entries: Mapping[str, int], tokenizer: Any, file: Path, read: list[str]
) -> None:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    other = [t for t, i in entries.items() if vocabulary.get(t) != i]
    if not other:
        return
    difference = (
        f"{len(other)} of its {len(entries)} tokens have another id, or none, in "
        f"{', '.join(read)}, e.g. {other[0]!r} ({entries[other[0]]} here, "
        f"{vocabulary.get(other[0], 'absent')} there)"
    )
    if 2 * len(other) <= len(entries):
        say(f"load: {file}: {type(tokenizer).__name__} did not read it, and {difference}")
        return
    raise CheckpointError(
        f"{type(tokenizer).__name__} (the tokenizer that AutoTokenizer chose) did not read it, and "
        f"it is another vocabulary: {difference}",
        where=str(file),
        fix="Remove the one that the model was not trained with.",
    )
