"""Good files with bytes changed at random: python -m tests.hostile.mutations SECONDS [SEED].

Each round takes one file of a good folder, changes it in one to eight places (a bit, a byte, a
piece removed, doubled or moved, a number or a bracket put in its place, a piece of another file),
and runs the command that reads it. Prints every round that ended in a way that no file may cause.
The n-th round of a seed is the same everywhere.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from tests.hostile.case import Case, Worker, described, run
from tests.hostile.groups import decoder_folder, encoder_folder
from tests.hostile.written import gguf_files

LOAD = ("run", "recipe.yaml", "--until", "load")
FILES = {
    "recipe.yaml": ("check", "recipe.yaml"),
    "calibrate.jsonl": ("run", "recipe.yaml", "--until", "compress"),
    "model/config.json": LOAD,
    "model/model.safetensors": LOAD,
    "model/tokenizer.json": LOAD,
    "model/tokenizer_config.json": LOAD,
    "model/generation_config.json": LOAD,
    "model/chat_template.jinja": LOAD,
    "model/tiny.gguf": gguf_files.LOAD,
}
HEAD = 20_000  # bytes of a file that most changes fall into: headers, not weights
PIECES = (
    b"-1", b"0", b"1e309", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"[[[[", b"}", b'"',
    b"\\u0000", b"\xff", b"99999999999999999999", b"\n", b"\t", b"&a", b"*a", b"!!", b": ", b"- ",
)  # fmt: skip


def mutated(raw: bytes, draw: random.Random, other: bytes) -> bytes:
    """The file with one to eight changes."""
    content = bytearray(raw)
    for _ in range(draw.randint(1, 8)):
        size = len(content)
        at = draw.randrange(min(size, HEAD if draw.random() < 0.9 else size) or 1)
        length = draw.choice((1, 1, 2, 4, 8, 64, 1024))
        kind = draw.randrange(7)
        if not content:
            break
        if kind == 0:
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            content[at] = draw.randrange(256)
        elif kind == 2:
            del content[at : at + length]
        elif kind == 3:
            content[at:at] = content[at : at + length] * draw.choice((1, 2, 50))
        elif kind == 4:
            content[at : at + draw.choice((0, 1, 3))] = draw.choice(PIECES)
        elif kind == 5:
            start = draw.randrange(len(other) or 1)
            content[at : at + length] = other[start : start + length]
        else:
            piece = bytes(content[at : at + length])
            del content[at : at + length]
            to = draw.randrange(len(content) + 1)
            content[to:to] = piece
    return bytes(content)


def case(folder: Path, seed: int, number: int) -> Case:
    """The n-th of a seed."""
    draw = random.Random(f"{seed}:{number}")
    name = draw.choice([f for f in FILES if (folder / f).is_file()])
    other = draw.choice([f for f in FILES if (folder / f).is_file()])
    raw = mutated((folder / name).read_bytes(), draw, (folder / other).read_bytes())
    return Case(
        f"{name}, round {number} of seed {seed}",
        lambda copy: (copy / name).write_bytes(raw) and None,
        FILES[name],
        harmless=True,
    )


def main() -> None:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    worker, failed, number = Worker(), 0, 0
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        folders = encoder_folder(Path(scratch) / "e"), decoder_folder(Path(scratch) / "d")
        gguf_files.write(folders[1] / gguf_files.FILE)
        while time.monotonic() < deadline:
            good = folders[number % 2]
            failures = run(worker, [case(good, seed, number)], good, Path(scratch))
            if failures:
                print(described(failures), flush=True)
            failed, number = failed + len(failures), number + 1
    worker.close()
    print(f"{failed} of {number} rounds of seed {seed} failed ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
