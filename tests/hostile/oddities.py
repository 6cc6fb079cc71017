"""Files that are wrong in other ways: keys that come twice, encodings, unusual numbers, links,
control characters and Unicode forms in names, what stands after the end."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import Case
from tests.hostile.written.checkpoints import JSON_FILES, LOAD, MODEL, SIZES

CHECK = ("check", "recipe.yaml")
NUMBERS = ("-0", "1e999", "-1e999", "1E400000000", "64.0", "6.4e1", "0x40", "1_000", "+64", "064",
           "NaN", "-Infinity", "true", "1" + "0" * 400, "1e-400", "0." + "0" * 5000 + "1", '"64"',
           "[64]", "64,", "/* 64 */ 64")  # fmt: skip
NAMES = ("", " ", "\0", "\n", "\x1b[2J", "\u202e", "\ud800", "e\u0301", "\u212b", "a/b", "../a",
         "a" * 5000, "__class__", "constructor", "%s", "{0}", "\ufeff", "💥" * 100)  # fmt: skip


def _change(
    file: str, change: Callable[[str], str], encoding: str = "utf-8"
) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / file
        text = path.read_bytes().decode() if path.exists() else "{}"
        path.write_bytes(change(text).encode(encoding, "surrogatepass"))

    return write


TEXTS: dict[str, Callable[[str], str]] = {
    "every key twice": lambda t: t.replace("{", '{"zzz": 1, "zzz": [], ', 1),
    "CRLF": lambda t: t.replace("\n", "\r\n"),
    "CR alone": lambda t: t.replace("\n", "\r"),
    "garbage behind": lambda t: t + "garbage",
    "another document behind": lambda t: t + '\n{"a": 1}',
    "a zero behind": lambda t: t + "\0",
    "comments": lambda t: "// of mine\n" + t,
    "a trailing comma": lambda t: t.rstrip().removesuffix("}") + ",}",
    "single quotes": lambda t: t.replace('"', "'"),
    "a BOM in the middle": lambda t: t.replace(":", ":\ufeff", 1),
    "a no-break space": lambda t: t.replace(": ", ":\u00a0", 1),
    "a million spaces": lambda t: t.replace(":", ":" + " " * 10**6, 1),
    "a string of 20 MB": lambda t: t.replace("{", '{"zzz": "' + "a" * 20_000_000 + '", ', 1),
    "100,000 keys": lambda t: t.replace(
        "{", "{" + "".join(f'"k{i}": {i}, ' for i in range(100_000)), 1
    ),
    "numbers without end": lambda t: t.replace("{", '{"zzz": ' + "9" * 4000 + ", ", 1),
    "an exponent without end": lambda t: t.replace("{", '{"zzz": 1e' + "9" * 4000 + ", ", 1),
    "escapes of surrogates": lambda t: t.replace("{", '{"zzz": "\\ud800\\udfff\\udfff", ', 1),
}


def json_texts(good: Path) -> list[Case]:
    cases = []
    for file in (f for f in JSON_FILES if (good / MODEL / f).exists()):
        at = f"{MODEL}/{file}"
        cases += [
            Case(f"{file}: {name}", _change(at, change), LOAD, (), True)
            for name, change in TEXTS.items()
        ]
        cases += [
            Case(f"{file}: {encoding}", _change(at, str, encoding), LOAD, (), True)
            for encoding in ("utf-8-sig", "utf-16-le", "utf-16-be", "utf-32", "utf-7", "cp037")
        ]
    return cases


def _number(field: str, text: str) -> Callable[[str], str]:
    def change(document: str) -> str:
        fields = json.loads(document)
        fields[field] = "@@"
        return json.dumps(fields).replace('"@@"', text)

    return change


def numbers() -> list[Case]:
    fields = [*SIZES[:4], "vocab_size", "pad_token_id", "layer_norm_eps"]
    return [
        Case(
            f"config.json: {field} as {text[:20]}",
            _change(f"{MODEL}/config.json", _number(field, text)),
            LOAD,
            ("config.json",),
            harmless=True,
        )
        for field in fields
        for text in NUMBERS
    ]


def _header(change: Callable[[dict[str, Any]], str | None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / MODEL / "model.safetensors"
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        document = json.loads(raw[8:end])
        text = (change(document) or json.dumps(document)).encode("utf-8", "surrogatepass")
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])

    return write


def _renamed(name: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        first = next(n for n in document if n != "__metadata__")
        document[name] = document.pop(first)

    return change


def weights() -> list[Case]:
    twice: Callable[[dict[str, Any]], str] = lambda d: json.dumps(d)[:-1] + "," + json.dumps(d)[1:]  # noqa: E731
    cases = [Case("safetensors: every name twice", _header(twice), LOAD, (), True)]
    cases += [
        Case(
            f"safetensors: a tensor called {name[:20]!a}",
            _header(_renamed(name)),
            LOAD,
            ("model",),
        )
        for name in NAMES
    ]
    for number in ("-0", "1e1", "0.0", "1e999", "true", "null"):

        def change(document: dict[str, Any], number: str = number) -> str:
            first = next(n for n in document if n != "__metadata__")
            document[first]["data_offsets"][0] = "@@"
            return json.dumps(document).replace('"@@"', number)

        name = f"safetensors: an offset of {number}"
        cases.append(Case(name, _header(change), LOAD, ("model.safetensors",), True))
    spaces: Callable[[dict[str, Any]], str] = lambda d: json.dumps(d) + " " * 10**6  # noqa: E731
    cases.append(Case("safetensors: a header with spaces", _header(spaces), LOAD, (), True))
    zeros: Callable[[dict[str, Any]], str] = lambda d: json.dumps(d) + "\0" * 64  # noqa: E731
    cases.append(Case("safetensors: a header with zeros", _header(zeros), LOAD, ("safetensors",)))
    return cases


def tokens() -> list[Case]:
    def vocabulary(name: str) -> Callable[[str], str]:
        def change(text: str) -> str:
            document = json.loads(text)
            words = document["model"]["vocab"]
            last = max(words, key=words.__getitem__)
            words[name] = words.pop(last)
            return json.dumps(document)

        return change

    def label(name: str) -> Callable[[str], str]:
        def change(text: str) -> str:
            document = json.loads(text)
            document["id2label"]["0"] = name
            return json.dumps(document)

        return change

    file = f"{MODEL}/tokenizer.json"
    return [
        *(
            Case(f"tokenizer.json: a word {n[:20]!a}", _change(file, vocabulary(n)), LOAD, (), True)
            for n in NAMES
        ),
        *(
            Case(
                f"config.json: a label {n[:20]!a}",
                _change(f"{MODEL}/config.json", label(n)),
                LOAD,
                (),
                True,
            )
            for n in NAMES
        ),
    ]


def places() -> list[Case]:
    """Links, names and permissions of the folder itself."""

    def linked(folder: Path) -> None:
        (folder / MODEL).rename(folder / "elsewhere")
        (folder / MODEL).symlink_to("elsewhere")

    def loop(folder: Path) -> None:
        (folder / MODEL / "loop").symlink_to("..")

    def deep(folder: Path) -> None:
        inner = folder / MODEL
        for _ in range(300):
            inner /= "d"
            inner.mkdir()

    def many(folder: Path) -> None:
        for i in range(5000):
            (folder / MODEL / f"f{i}.txt").touch()

    def names(folder: Path) -> None:
        for name in ("a\nb", "\x1b[31m", unicodedata.normalize("NFD", "é"), "é", " ", "-rf"):
            (folder / MODEL / name).write_text("x")

    def bytes_name(folder: Path) -> None:
        (Path(os.fsdecode(bytes(folder / MODEL))) / os.fsdecode(b"\xff\xfe")).write_text("x")

    def hard(folder: Path) -> None:
        os.link(folder / MODEL / "config.json", folder / MODEL / "generation_config.json")

    def other_case(folder: Path) -> None:
        (folder / MODEL / "config.json").rename(folder / MODEL / "Config.JSON")

    def twins(folder: Path) -> None:
        content = (folder / MODEL / "model.safetensors").read_bytes()
        (folder / MODEL / "model-00001-of-00002.safetensors").write_bytes(content)

    def closed(folder: Path) -> None:
        (folder / MODEL).chmod(0)

    makers = (linked, loop, deep, many, names, bytes_name, hard, other_case, twins, closed)
    return [Case(f"folder: {m.__name__}", m, LOAD, (), harmless=True) for m in makers]


RECIPES: dict[str, Callable[[str], str]] = {
    "a name in another form": lambda t: t.replace("name: tiny", "name: e\u0301"),
    "a name of a control character": lambda t: t.replace("name: tiny", 'name: "a\\x1bb"'),
    "a name that is a device": lambda t: t.replace("name: tiny", "name: /dev/null"),
    "a name that is a dot": lambda t: t.replace("name: tiny", "name: '.'"),
    "every key twice": lambda t: t + t,
    "a tab": lambda t: t.replace("  method", "\tmethod"),
    "CRLF": lambda t: t.replace("\n", "\r\n"),
    "a second document": lambda t: t + "---\nname: other\n",
    "an end and garbage": lambda t: t + "...\ngarbage\n",
    "a directive": lambda t: "%YAML 9.9\n---\n" + t,
    "octal": lambda t: t.replace("bits: 8", "bits: 010", 1),
    "hexadecimal": lambda t: t.replace("bits: 8", "bits: 0x8", 1),
    "base 60": lambda t: t.replace("bits: 8", "bits: 1:20", 1),
    "underscores": lambda t: t.replace("bits: 8", "bits: 0_8", 1),
    "minus zero": lambda t: t.replace("max_drop: 0.1", "max_drop: -0.0"),
    "a denormal": lambda t: t.replace("max_drop: 0.1", "max_drop: 5e-324"),
    "yes": lambda t: t.replace("must_beat_float: false", "must_beat_float: yes"),
    "a merge key": lambda t: t.replace("quantize:", "quantize:\n  <<: {method: rtn}"),
    "a source with a newline": lambda t: t.replace("source: model,", 'source: "mo\\ndel",'),
    "a source that is a URL": lambda t: t.replace("source: model,", "source: 'http://x/y',"),
    "a source in another form": lambda t: t.replace("source: model,", "source: mode\u0142,"),
    "files of nothing": lambda t: t.replace("[calibrate.jsonl]", "['']"),
    "files that are a star": lambda t: t.replace("[calibrate.jsonl]", "['*']"),
    "files that are the root": lambda t: t.replace("[calibrate.jsonl]", "['/']"),
    "a file that is its own": lambda t: t.replace("[calibrate.jsonl]", "[recipe.yaml]"),
    "samples of a true": lambda t: t.replace("samples: 16", "samples: true"),
    "samples of 16.0": lambda t: t.replace("samples: 16", "samples: 16.0"),
    "threads minus one": lambda t: t.replace("threads: 1", "threads: -1"),
}


def cases(good: Path) -> list[Case]:
    recipes = [
        Case(f"recipe: {name}", _change("recipe.yaml", change), argv, (), harmless=True)
        for name, change in RECIPES.items()
        for argv in (CHECK, LOAD)
    ]
    return [*json_texts(good), *numbers(), *weights(), *tokens(), *places(), *recipes]
