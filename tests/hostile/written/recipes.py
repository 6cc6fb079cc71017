"""Recipes that are wrong: every value of a good one replaced by every wrong one, and bad YAML."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.hostile.case import Case

CHECK = ("check", "recipe.yaml")
WRONG: dict[str, Any] = {
    "null": None,
    "list": [1, [2]],
    "mapping": {"a": {"b": 1}},
    "word": "nonsense",
    "empty": "",
    "negative": -1,
    "zero": 0,
    "huge": 10**30,
    "half": 0.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "true": True,
    "nul": "a\0b",
    "long": "x" * 5000,
    "home": "~nobody-at-all/x",
    "above": "../elsewhere",
}
# Values that may also be accepted; a path ends at its last key.
HARMLESS = {
    ("source", "null"),
    ("min_cosine", "null"),
    ("pooling", "null"),
}


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every section and value."""
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from leaves(inner, (*at, key))


def changed(recipe: Path, at: tuple[Any, ...], value: Any) -> None:
    document = yaml.safe_load(recipe.read_text())
    inner = document
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = copy.deepcopy(value)
    recipe.write_text(yaml.safe_dump(document, allow_unicode=False))


def values(good: Path) -> list[Case]:
    """Each value of the recipe, replaced by each wrong one. Whether a wrong one is harmless is for
    the schema to say: most of these are refused, and none may be called a bug."""

    def write(at: tuple[Any, ...], value: Any) -> Callable[[Path], None]:
        return lambda folder: changed(folder / "recipe.yaml", at, value)

    return [
        Case(
            f"recipe {'.'.join(map(str, at))} = {name}",
            write(at, value),
            CHECK,
            # what lies on disk is named as data, wherever the recipe names it
            culprit=() if {"files", "source", "columns"} & {*at} else ("recipe.yaml",),
            harmless=True,
        )
        for at in leaves(yaml.safe_load((good / "recipe.yaml").read_text()))
        for name, value in WRONG.items()
    ]


def text(content: str | bytes) -> Callable[[Path], None]:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / "recipe.yaml").write_bytes(raw) and None


def lines(more: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "recipe.yaml"
        file.write_text(file.read_text() + more)

    return write


def _instead(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "recipe.yaml").unlink()
        make(folder / "recipe.yaml")

    return write


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
TEXTS: dict[str, Callable[[Path], None]] = {
    "a date as a key": lines("2024-01-01: x\n"),
    "bytes as a key": lines("!!binary aGVsbG8=: x\n"),
    "a number as a key": lines("1: x\n"),
    "null as a key": lines("null: x\n"),
    "a list as a key": lines("? [a, b]\n: x\n"),
    "a mapping as a key": lines("? {a: b}\n: x\n"),
    "a date as a name": text("name: 2024-01-01\nmodel: {source: m}\n"),
    "an anchor that contains itself": lines("package: &p {licence: *p}\n"),
    "a list that contains itself": lines("package: &p [*p]\n"),
    "a mapping that is its own key": lines("package: &p {? *p : x}\n"),
    "900 levels of nesting": lines("package: " + "[" * 900 + "]" * 900 + "\n"),
    "50000 levels of nesting": lines("package: " + "[" * 50000 + "]" * 50000 + "\n"),
    "900 levels of mappings": lines("package: " + "{a: " * 900 + "1" + "}" * 900 + "\n"),
    "an integer of 5000 digits": lines(f"package: {{version: {'9' * 5000}}}\n"),
    "an integer of 5000 digits as a seed": lines(f"seed: {'9' * 5000}\n"),
    "a billion laughs": text(LAUGHS),
    "a billion laughs beside a recipe": lines(LAUGHS),
    "50 MB": lines("# " + "x" * 50_000_000 + "\n"),
    "50 MB of keys": lines("".join(f"k{i}: {i}\n" for i in range(200_000))),
    "not UTF-8": text(b"name: \xff\xfe\n"),
    "UTF-16": text("name: tiny\n".encode("utf-16")),
    "a NUL": text("name: ti\0ny\n"),
    "empty": text(""),
    "a scalar": text("hello\n"),
    "a list": text("- a\n- b\n"),
    "two documents": text("name: a\n---\nname: b\n"),
    "a tag": lines("package: !!python/object/apply:os.system ['true']\n"),
    "an unknown tag": lines("package: !nothing {}\n"),
    "a set": lines("package: !!set {a, b}\n"),
    "an omap": lines("package: !!omap [a: 1]\n"),
    "a tab": lines("package:\n\ttar: true\n"),
    "a merge key of nothing": lines("<<: 3\n"),
    "a sexagesimal": lines("package: {version: 1:30:00}\n"),
    "a surrogate": lines('package: {licence: "\\ud800"}\n'),
    "an undefined alias": lines("package: *nowhere\n"),
    "a timestamp": lines("package: {licence: 2024-01-01T00:00:00Z}\n"),
    "a directory": _instead(Path.mkdir),
    "a FIFO": _instead(os.mkfifo),
    "an endless file": _instead(lambda p: p.symlink_to("/dev/zero")),
    "a link to itself": _instead(lambda p: p.symlink_to(p.name)),
    "missing": _instead(lambda p: None),
    "not readable": lambda folder: (folder / "recipe.yaml").chmod(0),
}


def texts() -> list[Case]:
    return [
        Case(
            f"recipe: {name}",
            write,
            CHECK,
            culprit=("recipe.yaml",),
            harmless=name in ("not readable",),
        )
        for name, write in TEXTS.items()
    ]


OVERRIDES = {
    "a superscript digit": "targets.².threads=1",
    "an index out of range": "targets.7.threads=1",
    "a negative index": "targets.-1.threads=1",
    "no value": "quantize.method",
    "an empty path": "=x",
    "an empty part": "quantize..method=rtn",
    "into a word": "name.first=x",
    "bad YAML": "name=[",
    "a billion laughs": "package={" + LAUGHS.replace("\n", ", ").rstrip(", ") + "}",
    "deep": "package=" + "[" * 5000,
    "an integer of 5000 digits": "calibrate.seed=" + "9" * 5000,
    "a date": "name=2024-01-01",
    "a NUL": "name=a\0b",
    "a surrogate": "name=\udc80",
    "itself": "package=&a [*a]",
    "a path of 5000 parts": ".".join(["a"] * 5000) + "=1",
    "a root list": "targets=[]",
    "a key that is not a word": "targets.0.runtime.x=1",
}


def overrides() -> list[Case]:
    return [
        Case(
            f"--set: {name}",
            lambda folder: None,
            (*CHECK, "--set", value),
            ("name=",) if name == "a surrogate" else ("--set",),
        )
        for name, value in OVERRIDES.items()
        if "\0" not in value  # no command line can hold one
    ]


MEANINGLESS: dict[str, tuple[str, ...]] = {
    "two equal targets": ("targets=[{runtime: onnxruntime}, {runtime: onnxruntime}]", "targets"),
    "no batch": ("validate.latency.batch=[]", "latency.batch"),
    "no sequence": ("validate.latency.sequence=[]", "latency.sequence"),
    "a batch of 1e8": ("validate.latency.batch=[100000000]", "latency.batch"),
    "an infinite p99": ("validate.latency.p99_ms=.inf", "p99_ms"),
    "p99 of 1e308": ("validate.latency.p99_ms=1e308", "p99_ms"),
    "infinite seconds": ("validate.latency.max_seconds=.inf", "max_seconds"),
    "an infinite budget": ("validate.quantization_budget=.inf", "quantization_budget"),
    "a budget of 1e308": ("validate.quantization_budget=1.0e+308", "quantization_budget"),
    "infinite memory": ("compress.memory_gb=.inf", "memory_gb"),
    "no memory": ("compress.memory_gb=1e-30", "memory_gb"),
    "a negative seed": ("calibrate.seed=-1", "seed"),
    "a seed of 30 digits": (f"calibrate.seed={'9' * 30}", "seed"),
    "a seed of data": (f"validate.data.seed={'9' * 30}", "seed"),
    "a thousand million samples": ("calibrate.samples=1000000000", "samples"),
    "a billion windows": ("calibrate.generated=1000000000", "generated"),
    "a batch of a billion": ("calibrate.batch_size=1000000000", "batch_size"),
    "an evaluation batch of a billion": ("validate.batch_size=1000000000", "batch_size"),
    "100000 threads": ("targets.0.threads=100000", "threads"),
    "an empty source": ("model.source=''", "source"),
    "a source of 5000 characters": ("model.source=" + "x" * 5000, "source"),
    "a home of nobody": ("model.source=~nobody-at-all/x", "source"),
    "a subfolder above": ("model.subfolder=../elsewhere", "subfolder"),
    "an absolute subfolder": ("model.subfolder=/etc", "subfolder"),
    "a version that a failed run has": ("package.version=1.failed", "version"),
    "a version that ends in partial": ("package.version=1.partial", "version"),
    "a sequence beyond the model's": ("calibrate.sequence_length=100000", "sequence_length"),
    "a latency sequence beyond the model's": ("validate.latency.sequence=[4096]", "sequence"),
    "a max_length beyond the model's": ("model.max_length=100000", "max_length"),
    "an empty pattern": ("quantize.keep_float=['']", "keep_float"),
    "an empty file name": ("calibrate.data.files=['']", "files"),
    "a huge iteration count": ("validate.latency.iterations=1000000000", "iterations"),
    "a name of 300 characters": ("name=" + "x" * 300, "name"),
    "dots as a name": ("name=..", "name"),
    "latency data that is not a file": ("validate.latency.data.files=[/dev/zero]", "/dev/zero"),
    "no labels": ("validate.data.labels=['', '']", "labels"),
}


def meaningless() -> list[Case]:
    return [
        Case(
            f"recipe: {name}", lambda folder: None, ("plan", "recipe.yaml", "--set", value), (word,)
        )
        for name, (value, word) in MEANINGLESS.items()
    ]


def cases(good: Path) -> list[Case]:
    return [*values(good), *texts(), *overrides(), *meaningless()]
