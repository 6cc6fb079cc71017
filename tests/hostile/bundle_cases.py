"""Bundles that are wrong, generated from rules out of good ones: every field, every file, archives,
and files rewritten together with the manifest, so that its digests are right.

`python -m tests.hostile.bundle_cases` runs all of them and prints what ended badly.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from optimizer.cli import main as cli
from optimizer.harness.manifest import content_digest, digest
from tests.package import generation_bundle, small_bundle

SECONDS = 20.0
DEEP: Any = None
for _ in range(40):
    DEEP = [DEEP]
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "0": 0,
    "-1": -1,
    "1.5": 1.5,
    "10^30": 10**30,
    "1e308": 1e308,
    "empty text": "",
    "text": "x",
    "NUL": "a\0b",
    "..": "../../x",
    "long text": "x" * 200_000,
    "empty list": [],
    "list of a list": [[]],
    "deep list": DEEP,
    "empty object": {},
    "object": {"x": {"y": 1}},
}


@dataclass(frozen=True)
class Case:
    """name: what is wrong. run: makes it so, runs a command, and says what was bad about how that
    ended; "" when nothing was."""

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Good:
    """Bundles that nothing is wrong with; cases change them and put them back."""

    encoder: Path
    decoder: Path
    tar: Path


def make(folder: Path) -> Good:
    targets = (small_bundle.ORT, small_bundle.RTX)
    encoder = small_bundle.make(folder / "encoder", targets)
    (folder / "decoder").mkdir()
    return Good(
        encoder / "bundle", generation_bundle.make(folder / "decoder"), encoder / "tiny-1.tar"
    )


def ended(
    arguments: Sequence[str],
    named: Sequence[str] = (),
    accepted: Sequence[int] = (2,),
    data: bytes = b"",
) -> str:
    """Run one command; "" when it ended with an accepted code, in time, without a traceback, with
    one of `named` in what it said (where it was refused)."""
    start = time.monotonic()
    done = CliRunner().invoke(cli, list(arguments), input=data)
    seconds = time.monotonic() - start
    text = done.output
    if done.exit_code not in accepted or "Traceback" in text or "bug here" in text:
        return f"exit {done.exit_code}: {text[-400:]} {done.exception!r:.200}"
    if seconds > SECONDS:
        return f"{seconds:.0f} s"
    if done.exit_code == 2 and named and not any(n in text for n in (*named, "is not UTF-8")):
        return f"names none of {list(named)}: {text[-400:]}"
    return ""


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


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """The file as it was, afterwards."""
    data = path.read_bytes()
    try:
        yield
    finally:
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(data)


COMMANDS = ("predict", "check", "doctor", "inspect", "compare", "predict")


def command(name: str, bundle: Path) -> list[str]:
    more = {"predict": ["good film"], "compare": [str(bundle)]}
    return [name, str(bundle), *more.get(name, [])]


def of_manifest(bundle: Path, label: str) -> Iterator[Case]:
    """Every field dropped, and replaced by every value; the digests are made to match."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    number = 0
    for place in places(manifest):
        changes: dict[str, Any] = {"dropped": None, **VALUES}
        for what, value in changes.items():
            changed = copy.deepcopy(manifest)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            if what == "dropped":
                del holder[place[-1]]
            else:
                holder[place[-1]] = value
            number += 1
            name = COMMANDS[number % len(COMMANDS)]
            yield Case(
                f"{label} {'.'.join(map(str, place))} {what}: {name}",
                _with_manifest(bundle, changed, place, command(name, bundle)),
            )


def _with_manifest(
    bundle: Path, changed: dict[str, Any], place: tuple[Any, ...], arguments: list[str]
) -> Callable[[], str]:
    def run() -> str:
        path = bundle / "manifest.json"
        with kept(path):
            sealed = dict(changed)
            if place[0] != "content_digest":
                with suppress(AttributeError, KeyError, TypeError):
                    sealed["content_digest"] = content_digest(sealed["contract"], sealed["files"])
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
        os.urandom(0) + b"x" * 99,
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
    deep = b"".join(_nested(d) for d in (9000,))
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


ONNX_CHANGES: dict[str, Callable[[Any], None]] = {
    "with another output": _renamed_output,
    "with another input": _renamed_input,
    "of two tokens": _short_table,
    "without a sequence": _without_sequence,
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


def of_tars(tar: Path, work: Path) -> Iterator[Case]:
    """Archives that are cut, flipped, compressed, or hold what no bundle does."""
    data = tar.read_bytes()
    files: dict[str, bytes] = {"empty": b"", "zeros": bytes(10240), "junk": b"x" * 5000}
    for i in range(12):
        files[f"cut at {i}"] = data[: len(data) * i // 12 // 512 * 512 + (i % 2) * 100]
    generator = random.Random(7)
    for i in range(30):
        at = generator.randrange(1024)
        files[f"byte {at} of a header flipped, {i}"] = (
            data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
        )
    for kind in ("gz", "bz2", "xz"):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode=f"w:{kind}") as archive:  # type: ignore[call-overload]
            archive.addfile(tarfile.TarInfo("top/manifest.json"))
        files[kind] = out.getvalue()
    for what, members in TAR_MEMBERS.items():
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for member, content in members:
                archive.addfile(member, io.BytesIO(content))
        files[what] = out.getvalue()
    files["sparse, 3 GB"] = _sparse()
    for i, (what, content) in enumerate(files.items()):
        yield Case(f"tar {what}", _of_tar(work / f"{i}.tar", content))


def _member(
    name: str,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    size: int = 0,
    pax: dict[str, str] | None = None,
) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size, member.pax_headers = kind, link, size, pax or {}
    return member, bytes(size)


TAR_MEMBERS = {
    "5,000 characters": [_member("top/" + "x" * 5000)],
    "5,000 folders": [_member("top/" + "x/" * 5000 + "x")],
    "a file and a folder": [_member("top/a"), _member("top/a/b")],
    "a folder and a file": [_member("top/a/b"), _member("top/a")],
    "twice": [_member("top/a"), _member("top/a")],
    "without a folder": [_member("manifest.json")],
    "two folders": [_member("a/manifest.json"), _member("b/manifest.json")],
    "up": [_member("top/../../x")],
    "absolute": [_member("/etc/x")],
    "only a folder": [_member("top", tarfile.DIRTYPE)],
    "a link": [_member("top/a", tarfile.SYMTYPE, "/etc/passwd")],
    "a hard link": [_member("top/a"), _member("top/b", tarfile.LNKTYPE, "top/a")],
    "a device": [_member("top/a", tarfile.CHRTYPE)],
    "a fifo": [_member("top/a", tarfile.FIFOTYPE)],
    "another type": [_member("top/a", b"Z")],
    "NUL in a pax path": [_member("top/a", pax={"path": "top/a\0b"})],
    "a pax size": [_member("top/a", pax={"size": "99999999999999"})],
    "a negative pax size": [_member("top/a", pax={"size": "-5"})],
    "GNU.sparse in pax": [
        _member(
            "top/a",
            pax={
                "GNU.sparse.major": "1",
                "GNU.sparse.minor": "0",
                "GNU.sparse.realsize": "3221225472",
            },
        )
    ],
}


def _sparse() -> bytes:
    """An old GNU sparse member of 3 GB, in a tar of 10 KB."""
    member = tarfile.TarInfo("top/manifest.json")
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:398] = b"%011o\0" % 0
    header[398:410] = b"%011o\0" % 0
    header[483:495] = b"%011o\0" % (3 << 30)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(10240 - 512)


def _of_tar(path: Path, data: bytes) -> Callable[[], str]:
    def run() -> str:
        path.write_bytes(data)
        try:
            return ended(["check", str(path)], [str(path), "bundle"])
        finally:
            path.unlink()

    return run


LINES = (
    "[" * 50_000,
    "{" * 50_000,
    '{"prompt": ' + "[" * 50_000,
    '{"messages": [{"role": "user", "content": ' + "[" * 62 + "]" * 62 + "}]}",
    '{"prompt": "\\ud800"}',
    '{"messages": [{"role": "user", "content": "\\udfff"}]}',
    '{"messages": [{"role": "\\udfff", "content": "a"}]}',
    '{"messages": [{"role": 1}]}',
    '{"messages": [1.5]}',
    '{"messages": [99999999999]}',
    '{"messages": {}}',
    '{"messages": null}',
    '{"prompt": null}',
    '{"prompt": ""}',
    '{"prompt": "a", "prompt": "b"}',
    '{"prompt": "a", "temperature": 1e999}',
    '{"prompt": "a", "seed": ' + "9" * 5000 + "}",
    "null",
    "1",
    '"x"',
    "[]",
    "{}",
    "\x00",
)
OPTIONS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "do_sample",
    "ignore_eos",
    "nothing",
)


def of_lines(good: Good) -> Iterator[Case]:
    """Lines of JSON and options that mean nothing."""
    bundle = str(good.decoder)
    for i, line in enumerate(LINES):
        yield Case(f"line {i}", _line(bundle, line, "line 1"))
    for option in OPTIONS:
        for what, value in {**VALUES, "1e-300": 1e-300, "texts": ["a", "\ud800"]}.items():
            line = json.dumps({"prompt": "good", "max_new_tokens": 2} | {option: value})
            yield Case(f"option {option} {what}", _line(bundle, line, option, "surrogate"))
    encoder = str(good.encoder)
    for option in (
        "--threads",
        "--batch-size",
        "--text",
        "--pair",
        "--runtime",
        "--cache",
        "--stop",
    ):
        for value in ("", "0", "-1", "100000", "1e8", "nan", "²", "9" * 5000, "\udcff", "x"):
            if option in ("--text", "--stop", "--cache", "--runtime") and value not in (
                "\udcff",
                "",
            ):
                continue
            words = [option, option.strip("-"), "text", "line"]
            arguments = ["predict", encoder, option, value, "good"]
            yield Case(
                f"{option} {value[:9]!r}", lambda a=arguments, w=words: ended(a, w, (0, 2, 5))
            )  # type: ignore[misc]
    for option in ("--batch", "--sequence", "--iterations", "--texts-file", "--threads"):
        for value in ("", "-1", "100000000", "1e8", "9" * 5000, "/nowhere", "\udcff"):
            words = [
                option,
                *(
                    ["/nowhere", "cannot be read", "no plain file"]
                    if option == "--texts-file"
                    else []
                ),
            ]
            arguments = ["bench", encoder, option, value]
            yield Case(f"bench {option} {value[:9]!r}", lambda a=arguments, w=words: ended(a, w))  # type: ignore[misc]


def _line(bundle: str, line: str, *named: str) -> Callable[[], str]:
    data = line.encode(errors="surrogateescape") + b"\n"
    return lambda: ended(["predict", bundle, "--jsonl"], named, (0, 2), data)


def every(good: Good, work: Path) -> list[Case]:
    return [
        *of_manifest(good.encoder, "manifest"),
        *(c for c in of_manifest(good.decoder, "decoder") if ".generation" in c.name),
        *of_files(good.encoder),
        *of_extra_files(good.encoder),
        *of_contents(good),
        *of_tars(good.tar, work),
        *of_lines(good),
    ]


def main() -> int:
    """Run all of them; 1 when one ended badly."""
    with tempfile.TemporaryDirectory() as folder:
        cases = every(make(Path(folder)), Path(folder))
        wanted = sys.argv[1:]
        cases = [c for c in cases if not wanted or any(w in c.name for w in wanted)]
        start, bad, slowest = time.monotonic(), 0, (0.0, "")
        for case in cases:
            begun = time.monotonic()
            problem = case.run()
            slowest = max(slowest, (time.monotonic() - begun, case.name))
            if problem:
                bad += 1
                print(f"{case.name}: {problem}\n")
        print(f"{len(cases)} cases, {bad} bad, {time.monotonic() - start:.0f} s; slowest {slowest}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
