"""Rebuild jargon-*.jsonl and jargon.sha256 from the text of the Debian package `jargon-text`.

    apt-get download jargon-text && dpkg -x jargon-text_*.deb jargon
    zcat jargon/usr/share/doc/jargon-text/jargon.txt.gz > jargon.txt
    python calibration/make_jargon.py jargon.txt

Lines are joined into paragraphs, paragraphs that follow each other into documents; lists, tables
and very short paragraphs are left out. Order and split come from hashes of the documents. Sentences
are those of all documents but the ones that judge or time.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

EXPECTED = "40dfb4b98191a670a09a183d5798d50f243d23fdbd1495dcc0aca2ce5895ba97"  # of jargon.txt 4.4.7
SEED = "jargon-1"
SHORTEST, DOCUMENT = 120, 2400  # characters of a paragraph and of a document, at least
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z“])")
LENGTHS = (20, 400)  # characters of a sentence
SIZES = {"time": 24, "evaluate": 80, "calibrate": 150}  # documents


def paragraphs(text: str) -> list[str]:
    """List prose paragraphs in order, each once, on one line."""
    found: dict[str, None] = {}
    for block in text.split("\n\n"):
        lines = block.strip("\n").split("\n")
        indents = {len(line) - len(line.lstrip()) for line in lines}
        joined = " ".join(line.strip() for line in lines)
        letters = sum(c.isalpha() or c == " " for c in joined)
        if indents == {3} and len(joined) >= SHORTEST and letters > 0.9 * len(joined):
            found.setdefault(joined)
    return list(found)


def documents(parts: list[str]) -> list[str]:
    """Join neighbouring paragraphs into documents of the minimum length; sort by hash."""
    made: list[str] = []
    current: list[str] = []
    for part in parts:
        current.append(part)
        if sum(map(len, current)) >= DOCUMENT:
            made.append("\n\n".join(current))
            current = []
    return sorted(made, key=lambda d: hashlib.sha256(f"{SEED}:{d}".encode()).digest())


def sentences(texts: list[str]) -> list[str]:
    """List the sentences of documents, each once, in order."""
    parts = (part.strip() for text in texts for part in SENTENCE.split(text.replace("\n", " ")))
    return list(dict.fromkeys(p for p in parts if LENGTHS[0] <= len(p) <= LENGTHS[1]))


def write(texts: list[str], file: Path) -> str:
    """Write a file and return its line of jargon.sha256."""
    lines = (json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts)
    file.write_text("".join(lines), encoding="utf-8")
    return f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"


def main() -> None:
    raw = Path(sys.argv[1]).read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != EXPECTED:
        sys.exit(f"{sys.argv[1]} has sha256 {digest}; that of jargon-text 4.4.7 is {EXPECTED}")
    everything = pool = documents(paragraphs(raw.decode()))
    folder = Path(__file__).parent
    sums = []
    for name, size in SIZES.items():
        taken, pool = pool[:size], pool[size:]
        if len(taken) < size:
            sys.exit(f"{len(taken)} documents are left for {name}; {size} are wanted")
        file = folder / f"jargon-{name}.jsonl"
        sums.append(write(taken, file))
    judged = SIZES["time"] + SIZES["evaluate"]
    seen = " ".join(everything[:judged]).replace("\n", " ")
    rest = [s for s in sentences(everything[judged:]) if s not in seen]
    sums.append(write(rest, folder / "jargon-sentences.jsonl"))
    (folder / "jargon.sha256").write_text("".join(sums))


if __name__ == "__main__":
    main()
