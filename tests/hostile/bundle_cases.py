"""Bundles that are wrong, generated from rules out of good ones: every field of the manifest, every
file, files that nobody lists, and files rewritten together with the manifest, so that its digests
are right."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from optimizer.harness.bundle.manifest import digest, digest_content
from tests.hostile.cases import COMMANDS, VALUES, Case, Good, command, ended, kept
from tests.package.bundles import small_bundle


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in a document; of `files` and `recipe` only a few."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = sorted(value.items())
        if at == ("files",):
            items = [items[0], items[len(items) // 2], items[-1]]
        if at[:1] == ("recipe",):
            items = [
                (k, v) for k, v in items if k in ("validate", "latency", "batch", "iterations")
            ]
    elif isinstance(value, list):
        items = list(enumerate(value))[:3]
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def of_manifest(bundle: Path, label: str) -> Iterator[Case]:
    """Every field dropped, and replaced by every value; the digests are made to match."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    number = 0
    for place in places(manifest):
        changes: dict[str, Any] = {"dropped": None, **VALUES}
        for what, value in changes.items():
            change = partial(_changed, manifest, place, value, dropped=what == "dropped")
            number += 1
            name = COMMANDS[number % len(COMMANDS)]
            yield Case(
                f"{label} {'.'.join(map(str, place))} {what}: {name}",
                _with_manifest(bundle, change, place, command(name, bundle)),
            )


def _changed(
    manifest: dict[str, Any], place: tuple[Any, ...], value: Any, *, dropped: bool
) -> dict[str, Any]:
    """A copy with another value at a place, or without it."""
    changed = copy.deepcopy(manifest)
    holder: Any = changed
    for key in place[:-1]:
        holder = holder[key]
    if dropped:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return changed


def _with_manifest(
    bundle: Path,
    change: Callable[[], dict[str, Any]],
    place: tuple[Any, ...],
    arguments: list[str],
) -> Callable[[], str]:
    """Run a command on the bundle with the changed manifest; the copy is made here, because most
    cases are not drawn."""

    def run() -> str:
        path = bundle / "manifest.json"
        with kept(path):
            sealed = change()
            if place[0] != "content_digest":
                with suppress(AttributeError, KeyError, TypeError):
                    sealed["content_digest"] = digest_content(sealed["contract"], sealed["files"])
            if place[0] != "digest":
                sealed["digest"] = digest(sealed)
            path.write_text(json.dumps(sealed))
            words = [str(k) for k in place if isinstance(k, str)]
            return ended(arguments, words, (0, 2, 5))

    return run


def of_files(bundle: Path) -> Iterator[Case]:
    """Every file flipped, cut, emptied, removed, linked, made a folder."""
    for name in sorted(json.loads((bundle / "manifest.json").read_text())["files"]):
        for what, change in FILE_CHANGES.items():
            if (bundle / name).stat().st_size or what not in ("flipped", "cut", "emptied"):
                yield Case(f"{name} {what}", _with_file(bundle, name, change))


FILE_CHANGES: dict[str, Callable[[Path, bytes], object]] = {
    "flipped": lambda p, d: p.write_bytes(bytes([d[0] ^ 1]) + d[1:]),
    "cut": lambda p, d: p.write_bytes(d[: len(d) // 2]),
    "emptied": lambda p, d: p.write_bytes(b""),
    "longer": lambda p, d: p.write_bytes(d + b"\0"),
    "missing": lambda p, d: p.unlink(),
    "a link": lambda p, d: (p.unlink(), p.symlink_to("/dev/zero")),
    "a folder": lambda p, d: (p.unlink(), p.mkdir()),
}


def _with_file(
    bundle: Path, name: str, change: Callable[[Path, bytes], object]
) -> Callable[[], str]:
    def run() -> str:
        path = bundle / name
        with kept(path):
            change(path, path.read_bytes())
            return ended(["check", str(bundle)], [name])

    return run


def of_extra_files(bundle: Path) -> Iterator[Case]:
    """Files that the manifest does not list."""
    folders = ("", "harness/", "harness/tasks/", "model/", "tokenizer/", "engines/", "new/")
    names = ("numpy.py", "x.pyc", "__pycache__/fit.cpython-311.pyc", "x.so", "notes.txt", "é\n")
    for name in (f + n for f in folders for n in names):
        yield Case(f"extra {name!r}", _with_extra(bundle, name))


def _with_extra(bundle: Path, name: str) -> Callable[[], str]:
    def run() -> str:
        path = bundle / name
        above = [p for p in path.parents if not p.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        try:
            shown = name.replace("\n", "")
            return ended(["check", str(bundle)], [shown]) or ended(
                ["inspect", str(bundle)], [shown]
            )
        finally:
            path.unlink()
            for folder in above:
                folder.rmdir()

    return run


def of_ledger(bundle: Path) -> Iterator[Case]:
    """A report whose ledger is not what the validate stage writes, to `explain`."""
    hop = {"hop": "a", "limit": 1.0, "ok": False, "problems": [], "pieces": []}
    for what, value in VALUES.items():
        ledgers = {"whole": value, "hop": [value], **{k: [{**hop, k: value}] for k in hop}}
        for place, ledger in ledgers.items():
            document = {"target": "t", "ledger": ledger}
            yield Case(f"ledger {place} {what}", _of_ledger(bundle.parent / "r.json", document))


def _of_ledger(path: Path, document: Any) -> Callable[[], str]:
    def run() -> str:
        path.write_text(json.dumps(document))
        return ended(["explain", str(path)], [path.name], (0, 2))

    return run


def of_contents(good: Good) -> Iterator[Case]:
    """Files rewritten together with the manifest: its digests are right, the files are wrong."""
    encoder, decoder = good.encoder, good.decoder
    tokenizer = json.loads((encoder / "tokenizer/tokenizer.json").read_text())
    junk = (
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 50_000,
        b"\0" * 4096,
        b"x" * 99,
    )
    unknown = copy.deepcopy(tokenizer)
    unknown["model"]["unk_token"] = "[GONE]"
    texts = {f"junk {i}": j for i, j in enumerate(junk)}
    for what, data in {**texts, "without its unk token": json.dumps(unknown).encode()}.items():
        name = "tokenizer/tokenizer.json"
        yield Case(
            f"{name} {what}", _rewritten(encoder, name, data, ["predict", str(encoder), "good ☃"])
        )
    model = json.loads((encoder / "manifest.json").read_text())["engines"][0]["model"]
    deep = _nested(9000)
    onnx = (encoder / model).read_bytes()
    for what, data in {
        **texts,
        "nested": deep,
        "cut": onnx[: len(onnx) // 2],
        "other": (decoder / _model(decoder)).read_bytes(),
    }.items():
        for name in ("predict", "check"):
            yield Case(
                f"model {what}: {name}",
                _rewritten(
                    encoder,
                    model,
                    data,
                    command(name, encoder),
                    (0, 2, 5) if name == "check" else (2, 5),
                ),
            )
    for what, change in ONNX_CHANGES.items():
        data = _onnx_changed(onnx, change)
        yield Case(f"model {what}", _rewritten(encoder, model, data, command("predict", encoder)))
    reports = json.loads((encoder / "report.json").read_text())
    odd = [
        [{"target": reports[0]["target"], key: v}]
        for key in ("speed", "quality")
        for v in VALUES.values()
    ]
    for i, data in enumerate([*junk, *(json.dumps(o).encode() for o in odd)]):
        yield Case(
            f"report.json {i}",
            _rewritten(
                encoder, "report.json", data, ["compare", str(encoder), str(encoder)], (0, 2)
            ),
        )


def _renamed_output(model: Any) -> None:
    name = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = [f"{o} of another" if o == name else o for o in node.output]
    model.graph.output[0].name = f"{name} of another"


def _short_table(model: Any) -> None:
    """An embedding of two tokens: others are out of range."""
    import numpy as np
    from onnx import numpy_helper

    for tensor in model.graph.initializer:
        if tensor.name == "embedding":
            array = numpy_helper.to_array(tensor)[:2]
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))


def _without_sequence(model: Any) -> None:
    """The mean over the sequence in place of every position."""
    from onnx import TensorProto, helper

    name = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = [f"{o} whole" if o == name else o for o in node.output]
    model.graph.initializer.append(helper.make_tensor("axes", TensorProto.INT64, [1], [1]))
    mean = helper.make_node("ReduceMean", [f"{name} whole", "axes"], [name], keepdims=0)
    model.graph.node.append(mean)
    del model.graph.output[0].type.tensor_type.shape.dim[1]


def _renamed_input(model: Any) -> None:
    for node in model.graph.node:
        node.input[:] = ["other" if i == "input_ids" else i for i in node.input]
    for value in model.graph.input:
        value.name = "other" if value.name == "input_ids" else value.name


def _not_a_number(model: Any) -> None:
    """Its answers are NaN."""
    from onnx import TensorProto, helper

    name = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = [f"{o} whole" if o == name else o for o in node.output]
    zero = helper.make_tensor("zero of another", TensorProto.FLOAT, [1], [0.0])
    model.graph.initializer.append(zero)
    model.graph.node.append(helper.make_node("Mul", [f"{name} whole", zero.name], ["nothing"]))
    model.graph.node.append(helper.make_node("Div", ["nothing", zero.name], [name]))


ONNX_CHANGES: dict[str, Callable[[Any], None]] = {
    "with another output": _renamed_output,
    "with another input": _renamed_input,
    "of two tokens": _short_table,
    "without a sequence": _without_sequence,
    "of NaN": _not_a_number,
}


def _onnx_changed(data: bytes, change: Callable[[Any], None]) -> bytes:
    import onnx

    model = onnx.load_from_string(data)
    change(model)
    return bytes(model.SerializeToString())


def _model(bundle: Path) -> str:
    return str(json.loads((bundle / "manifest.json").read_text())["engines"][0]["model"])


def _nested(depth: int) -> bytes:
    """An ONNX model whose one node holds a graph, whose node holds a graph, and so on."""
    data = b""
    for _ in range(depth):
        for tag in (0x32, 0x2A, 0x0A):  # attribute.g, node.attribute, graph.node
            size, length = b"", len(data)
            while length >= 128:
                size, length = size + bytes([length & 127 | 128]), length >> 7
            data = bytes([tag]) + size + bytes([length]) + data
    size, length = b"", len(data)
    while length >= 128:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return b"\x3a" + size + bytes([length]) + data


def _rewritten(
    bundle: Path, name: str, data: bytes, arguments: list[str], accepted: Sequence[int] = (2, 5)
) -> Callable[[], str]:
    def run() -> str:
        with kept(bundle / name), kept(bundle / "manifest.json"):
            (bundle / name).write_bytes(data)
            entry = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            small_bundle.edited(bundle, lambda m: m["files"][name].update(entry))
            return ended(arguments, [Path(name).name, Path(name).stem], accepted)

    return run
