"""Rebuild search-queries.jsonl and search-documents.jsonl from jargon-*.jsonl.

    python calibration/make_search.py

A query is the first sentence of a paragraph, and its relevant document the rest of it (the inverse
cloze task: Lee, Chang, Toutanova 2019, ACL, 6086-6096). Queries are from the paragraphs that judge
and time; documents also from those that calibrate, so that no query is a text that a recipe
calibrates on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z“])")
QUERY = (40, 400)  # characters
DOCUMENT = (60, 1000)  # characters
FOLDER = Path(__file__).parent


def pairs(name: str) -> Iterator[tuple[str, str]]:
    """Yield (first sentence, rest) of the paragraphs of jargon-NAME.jsonl."""
    for line in (FOLDER / f"jargon-{name}.jsonl").read_text("utf-8").splitlines():
        for paragraph in json.loads(line)["text"].split("\n\n"):
            first, *rest = SENTENCE.split(paragraph, maxsplit=1)
            fits = rest and QUERY[0] <= len(first) <= QUERY[1]
            if fits and DOCUMENT[0] <= len(rest[0]) <= DOCUMENT[1]:
                yield first, rest[0]


def write(rows: Sequence[dict[str, str]], name: str) -> str:
    """Write a file and return its line of search.sha256."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (FOLDER / name).write_text(text, "utf-8")
    return f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n"


def main() -> None:
    judged = dict(pair for name in ("evaluate", "time") for pair in pairs(name))
    documents = dict.fromkeys([*judged.values(), *(rest for _, rest in pairs("calibrate"))])
    sums = write(
        [{"query": query, "document": rest} for query, rest in judged.items()],
        "search-queries.jsonl",
    )
    sums += write([{"text": rest} for rest in documents], "search-documents.jsonl")
    (FOLDER / "search.sha256").write_text(sums, "utf-8")


if __name__ == "__main__":
    main()
