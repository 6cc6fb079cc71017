"""Read the labelled pairs that set a semantic cache's threshold: a JSON object on each line.

{"text": "How do I pay?", "text_pair": "Which ways are there to pay?", "same": true}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...bounds import LINE, TEXT
from ...errors import InputError
from ...trust.plain_file import read as read_regular
from .false_hits import QuestionPair

LARGEST = 64 << 20  # maximum bytes of the file
FIELDS = ("text", "text_pair", "same")
FORM = '{"text": "...", "text_pair": "...", "same": true or false} on each line'


def read(file: Path) -> list[QuestionPair]:
    """Read the labelled pairs of questions in a file, from which the cache's threshold follows.
    Raises InputError naming the first line that is not a pair."""
    lines = enumerate(read_regular(file, LARGEST).splitlines(), 1)
    return [_pair(line, f"{file}, line {i}", i) for i, line in lines if line.strip()]


def _pair(line: bytes, where: str, number: int) -> QuestionPair:
    """Parse one line of the file `where`, a pair of questions for the semantic cache. Raises
    InputError naming the line by `number`."""
    try:
        value: Any = json.loads(line.decode()) if len(line) <= LINE else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not all(name in value for name in FIELDS):
        raise InputError("not a labelled pair", where=where, accepted=FORM)
    text, other, same = (value[name] for name in FIELDS)
    for one in (text, other):
        if not isinstance(one, str) or not 0 < len(one) <= TEXT:
            raise InputError(
                f"text or text_pair is not a string of 1 to {TEXT:,} characters",
                where=where,
                accepted=FORM,
            )
    if not isinstance(same, bool):
        raise InputError("'same' is not true or false", where=where, accepted=FORM)
    return QuestionPair(number, text, other, same)
