"""Data files that are wrong: csv, json, parquet and text, and what a spec may say of them."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import Case

ROW = {"text": "the good movie is great", "label": 1}
READ = ("run", "recipe.yaml", "--until", "compress")
BIG = 4_000_000
DEPTH = 50_000


def _rows(count: int = 40) -> list[dict[str, Any]]:
    words = [
        "the",
        "good",
        "bad",
        "movie",
        "film",
        "place",
        "night",
        "people",
        "story",
        "plot",
        "staff",
    ]
    return [{"text": f"{words[i % 11]} {words[i % 7]} {i}", "label": i % 2} for i in range(count)]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in rows).encode()


def csv(rows: list[Any]) -> bytes:
    return ("text,label\n" + "".join(f"{r['text']},{r['label']}\n" for r in rows)).encode()


def plain(rows: list[Any]) -> bytes:
    return "".join(f"{r['text']}\n" for r in rows).encode()


JSON: dict[str, bytes] = {
    "empty": b"",
    "white space": b" \n\n ",
    "a line nested 50000 deep": lines(_rows())
    + b'{"text": '
    + b"[" * DEPTH
    + b"]" * DEPTH
    + b"}\n",
    "an object nested 50000 deep": b'{"text": ' + b'{"a": ' * DEPTH + b"1" + b"}" * DEPTH + b"}\n",
    "deep from the first byte": b"[" * DEPTH + b"]" * DEPTH,
    "cut": lines(_rows())[:-20],
    "not JSON": b"hello\nworld\n",
    "not UTF-8": b'{"text": "\xff\xfe"}\n',
    "a row that is not UTF-8": lines(_rows()).replace(b"bad", b"b\xe6d"),
    "UTF-16": lines(_rows()).decode().encode("utf-16"),
    "a NUL": lines(_rows()) + b'{"text": "a\0b"}\n',
    "numbers": lines([1, 2, 3]),
    "lists": lines([[1], [2]]),
    "mixed kinds": lines([{"text": "a"}, {"text": 7}, {"text": ["b"]}]),
    "texts that are mappings": lines([{"text": {"a": i}} for i in range(20)]),
    "texts that are true": lines([{"text": True} for _ in range(20)]),
    "texts that are null": lines([{"text": None} for _ in range(20)]),
    "another column": lines([{"words": "a"} for _ in range(20)]),
    "no column": lines([{} for _ in range(20)]),
    "a NaN": b'{"text": NaN}\n' * 20,
    "an integer of 5000 digits": b'{"text": "a", "label": ' + b"9" * 5000 + b"}\n",
    "a huge label": lines([{"text": f"a {i}", "label": 2**62} for i in range(20)]),
    "lone surrogates": b'{"text": "\\ud800 a", "label": 0}\n' * 20,
    "a thousand columns": lines([{**ROW, **{f"c{i}": i for i in range(1000)}}]),
    "one field of 4 MB": lines(
        [*_rows(), {"text": "x" * BIG, "label": 1}, {"text": "good bad " * (BIG // 9), "label": 0}]
    ),
    "an open string of escaped quotes": b'{"text": "' + b'\\"' * 300_000,
    "100000 keys": lines([{f"c{i}": i for i in range(100_000)}]),
    "a key of 1 MB": b'{"' + b"k" * 1_000_000 + b'": "a", "text": "b"}\n',
    "two keys of one name": b'{"text": "a", "text": "b", "label": 1}\n' * 20,
    "an object of all": json.dumps({"data": _rows()}).encode(),
    "a BOM": b"\xef\xbb\xbf" + lines(_rows()),
    "one row": lines(_rows(1)),
    "one text a hundred times": lines([ROW] * 100),
}
CSV: dict[str, bytes] = {
    "empty": b"",
    "a header alone": b"text,label\n",
    "one field of 4 MB": csv(_rows()) + b"x" * BIG + b",1\n",
    "a quoted field of 4 MB": csv(_rows()) + b'"' + b"good bad\n" * (BIG // 9) + b'",1\n',
    "an open quote": csv(_rows()) + b'"never closed,1\n',
    "rows of other lengths": b"text,label\na\nb,1,2,3\n",
    "a NUL in a cell": csv(_rows()) + b"a\0b,1\n",
    "a NUL far behind": csv(_rows()) + b"a film,1\n" * 200_000 + b"a\0b,1\n",
    "not UTF-8": b"text,label\n\xff\xfe,1\n",
    "UTF-16": csv(_rows()).decode().encode("utf-16"),
    "binary": bytes(range(256)) * 100,
    "rows of 100000 cells": b"text,label\n" + (b"a," * 100_000 + b"\n") * 20,
    "10000 columns": b",".join(b"c%d" % i for i in range(10_000)) + b"\n",
    "two columns of one name": b"text,text\na,b\nc,d\n",
    "no text column": b"words,label\na,1\n",
    "labels that are words": b"text,label\n" + b"".join(b"a %d,yes\n" % i for i in range(40)),
}
TEXT: dict[str, bytes] = {
    "empty": b"",
    "one line of 4 MB": b"good bad movie " * (BIG // 15),
    "one word of 4 MB": plain(_rows()) + b"x" * BIG + b"\n",
    "10 MB of spaces": plain(_rows()) + b" " * BIG + b"end\n",
    "not UTF-8": b"\xff\xfe\xfd\n" * 20,
    "a NUL": b"a\0b\n" * 20,
    "empty lines": b"\n" * 1000,
    "control characters": bytes(range(1, 32)) * 20,
    "one line": b"the good movie\n",
}
PARQUET: dict[str, bytes] = {
    "empty": b"",
    "not parquet": b"PAR1 hello PAR1",
    "zeros": b"\0" * 1000,
    "a huge footer": b"PAR1" + b"\xff\xff\xff\x7f" + b"PAR1",
}
FORMATS = {"json": JSON, "csv": CSV, "text": TEXT, "parquet": PARQUET}
HARMLESS = (
    "lone surrogates",
    "a thousand columns",
    "an integer of 5000 digits",
    "one field of 4 MB",
    "a quoted field of 4 MB",
    "a key of 1 MB",
    "two keys of one name",
    "an object of all",
    "a BOM",
    "a NUL",
    "one row",
    "one text a hundred times",
    "one line of 4 MB",
    "one word of 4 MB",
    "10 MB of spaces",
    "an open quote",
    "binary",
    "control characters",
    "one line",
    "labels that are words",
    "a huge label",
    "mixed kinds",
    "rows of other lengths",
    "UTF-16",
    "cut",
    "two columns of one name",
)


def contents() -> list[Case]:
    def write(name: str, content: bytes) -> Callable[[Path], None]:
        return lambda folder: (folder / name).write_bytes(content) and None

    cases = []
    for source, kinds in FORMATS.items():
        for kind, content in kinds.items():
            file = f"hostile.{source}"
            spec = f"calibrate.data={{source: {source}, files: [{file}]}}"
            cases.append(
                Case(
                    f"data {source}: {kind}",
                    write(file, content),
                    (*READ, "--set", spec),
                    (file,),
                    harmless=kind in HARMLESS,
                )
            )
    return cases


SPECS: dict[str, str] = {
    "a column of nothing": "{source: json, files: [calibrate.jsonl], columns: {text: nowhere}}",
    "a field of nothing": "{source: json, files: [calibrate.jsonl], columns: {words: text}}",
    "no files": "{source: json}",
    "a file that is not there": "{source: json, files: [nowhere.jsonl]}",
    "a glob of nothing": "{source: json, files: ['*.nothing']}",
    "a glob that is wrong": "{source: json, files: ['**nowhere']}",
    "a file name with a NUL": '{source: json, files: ["a\\0b"]}',
    "a file name of 5000": "{source: json, files: [" + "x" * 5000 + "]}",
    "a directory": "{source: json, files: [model]}",
    "an endless file": "{source: text, files: [/dev/zero]}",
    "a FIFO": "{source: text, files: [fifo]}",
    "a file of processes": "{source: text, files: [/proc/self/mem]}",
    "a link to itself": "{source: text, files: [loop]}",
    "a file nobody may read": "{source: json, files: [secret.jsonl]}",
    "a split of nothing": "{source: model, split: nowhere}",
    "a folder without data": "{source: model}",
    "a folder above": "{source: ../../../..}",
    "a hub id of nothing": "{source: nobody/nothing}",
    "an empty source": "{source: ''}",
    "a blank source": "{source: ' '}",
    "a source with a NUL": '{source: "a\\0b"}',
    "a source of 5000 characters": "{source: " + "x" * 5000 + "}",
    "a home of nobody": "{source: ~nobody-at-all}",
    "a split of dots": "{source: json, files: [calibrate.jsonl], split: '../x'}",
    "a split that is empty": "{source: json, files: [calibrate.jsonl], split: ''}",
    "a split of arithmetic": "{source: json, files: [calibrate.jsonl], split: 'train[:200%]'}",
    "a folder of nothing": "{source: nothing}",
    "a folder of no data": "{source: binary}",
    "a folder of a broken link": "{source: broken}",
    "a folder of bad configs": "{source: configs}",
    "a folder of a deep row": "{source: deep}",
    "a folder of a damaged file": "{source: damaged}",
    "a folder of processes": "{source: /proc}",
    "a damaged gzip file": "{source: json, files: [damaged/train.jsonl.gz]}",
    "a file that unfolds to a thousand times its size": "{source: json, files: [bomb.jsonl.xz]}",
    "csv read as json": "{source: json, files: [table.csv]}",
    "json read as parquet": "{source: parquet, files: [calibrate.jsonl]}",
}


def _folders(folder: Path) -> None:
    for name in ("nothing", "binary", "broken", "configs", "deep", "damaged"):
        (folder / name).mkdir()
    (folder / "binary/a.bin").write_bytes(b"a")
    (folder / "broken/train.jsonl").symlink_to("nowhere")
    (folder / "configs/README.md").write_text("---\nconfigs: 7\n---\n")
    (folder / "configs/train.jsonl").write_bytes(lines(_rows()))
    (folder / "deep/train.jsonl").write_bytes(lines(_rows()) + b'{"text": ' + b"[" * DEPTH)
    packed = bytearray(gzip.compress(lines(_rows())))
    packed[len(packed) // 2] ^= 255
    (folder / "damaged/train.jsonl.gz").write_bytes(packed)
    (folder / "bomb.jsonl.xz").write_bytes(lzma.compress(b"\n" * BIG) * 12)


def specs() -> list[Case]:
    def write(folder: Path) -> None:
        _folders(folder)
        os.mkfifo(folder / "fifo")
        (folder / "loop").symlink_to("loop")
        (folder / "table.csv").write_bytes(csv(_rows()))
        (folder / "secret.jsonl").write_bytes(lines(_rows()))
        (folder / "secret.jsonl").chmod(0)

    harmless = ("a file nobody may read",)  # root may
    return [
        Case(
            f"data spec: {name}",
            write,
            (*READ, "--set", f"calibrate.data={spec}"),
            harmless=name in harmless,
        )
        for name, spec in SPECS.items()
    ]


def cases() -> list[Case]:
    return [*contents(), *specs()]
