"""Write reviews-*.jsonl, sentences of film and product reviews, from the source of a PyPI package.

    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    python calibration/make_reviews.py vaderSentiment-3.3.2.tar.gz

They are not kept in this repository: the package is under the MIT licence, but its sentences are
other people's (rottentomatoes.com, amazon.com). Collected and rated for: C.J. Hutto and E. Gilbert,
*VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text*, ICWSM 2014.

Order and split come from hashes of the texts. Changes: white space is trimmed, repeated
sentences are kept once, and those that sentiment-*.jsonl has are left out. A label is the sign of
the mean of twenty people's ratings; sentences that they did not agree on (closer to 0 than half a
point of four) have none and are learned from only. reviews-learn has every sentence that does not
judge, without its label; reviews-train those of them that have one.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

SOURCE = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
FILES = {
    "movie": "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt",
    "amazon": "hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt",
}
SEED = "reviews-1"
EVALUATE, CLEAR = 5000, 0.5


def ratings(package: Path) -> list[tuple[str, str, float]]:
    """Read (origin, sentence, mean rating) in the package's order."""
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != SOURCE:
        sys.exit(f"{package} has sha256 {found}; that of vaderSentiment-3.3.2.tar.gz is {SOURCE}")
    with tarfile.open(package) as outer:
        inner = outer.extractfile(INNER)
        assert inner is not None
        content = inner.read()
    rows = []
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for origin, name in FILES.items():
            file = archive.extractfile(name)
            assert file is not None
            for line in file.read().decode("utf-8").splitlines():
                _, rating, text = line.split("\t", 2)
                rows.append((origin, " ".join(text.split()), float(rating)))
    return rows


def letters(text: str) -> str:
    """Reduce a sentence to its letters, which are equal in copies of it."""
    return "".join(c for c in text.casefold() if c.isalnum())


def digest(text: str) -> bytes:
    return hashlib.sha256(f"{SEED}:{text}".encode()).digest()


def split(
    rows: list[tuple[str, str, float]], known: set[str]
) -> dict[str, list[dict[str, object]]]:
    """Split into training sentences, the labelled ones among them, and evaluation sentences.

    Sentences of `known` are left out, and no sentence is in both training and evaluation.
    """
    unique: dict[str, tuple[str, str, float]] = {}
    for row in rows:
        unique.setdefault(letters(row[1]), row)
    every = sorted(
        (row for same, row in unique.items() if same and same not in known),
        key=lambda row: digest(row[1]),
    )
    clear = [row for row in every if abs(row[2]) >= CLEAR]
    judge = {row[1] for row in clear[:EVALUATE]}

    def labelled(rows: list[tuple[str, str, float]]) -> list[dict[str, object]]:
        return [{"text": t, "label": int(r > 0), "origin": o} for o, t, r in rows]

    return {
        "evaluate": labelled(clear[:EVALUATE]),
        "train": labelled(clear[EVALUATE:]),
        "learn": [{"text": t} for _, t, _ in every if t not in judge],
    }


def main(package: Path, out: Path) -> None:
    """Write the files."""
    known = {
        letters(json.loads(line)["text"])
        for file in sorted(out.glob("sentiment-*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    }
    for name, part in split(ratings(package), known).items():
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (out / f"reviews-{name}.jsonl").write_text(content, encoding="utf-8")
        print(f"reviews-{name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(__file__).parent)
