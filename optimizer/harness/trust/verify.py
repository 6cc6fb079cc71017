"""Compare a bundle with its manifest before anything in it runs. Standard library only.

    python -I -S verify.py [BUNDLE]        the folder of this file by default

Checked: the manifest's digest; size and sha256 of every file it lists; that nothing else is there
(files, links, devices, and bytecode, which Python would run instead of the sources); and that
models, engines, tokenizer and contract are those that report.json judged. Nothing is imported from
the bundle, and nothing in it is run or written. Exit: 0 the bundle matches its manifest; 2 it does
not, with a line for each difference.

A digest detects damage, not an attacker, who could change this file as well. Against attackers, get
this file from another source, and compare the digest that it prints with one that you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
REPORT = "report.json"
OPENED_WITH = ("runtime", "device", "provider", "threads", "fit")
"""Fields of an engine in the manifest that decide how it is opened."""
LARGEST = 16 << 20  # maximum bytes of a manifest; 2 MiB hold 10,000 files
DEEPEST = 64  # maximum nesting of objects and lists; a manifest has about 12
LONGEST = 1024  # maximum characters of a file's name
LONGEST_PART = 255  # maximum bytes between two slashes
STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.S)
BRACKET = re.compile(r"[\[{\]}]")


def parse(data: bytes, *, finite: bool = True) -> Any:
    """Parse a bundle's untrusted JSON document strictly.

    finite: False accepts NaN and Infinity, which a report holds if a model computed them

    Raises ValueError for bytes that are not JSON or not UTF-8, a duplicate key, a lone surrogate,
    and nesting deeper than DEEPEST.
    """
    text = data.decode("utf-8")
    depth = 0
    for bracket in BRACKET.finditer(STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} objects and lists in each other")
    return parse_shallow(text, finite=finite)


def parse_shallow(text: str, *, finite: bool = True) -> Any:
    """Parse JSON of a bundle as `parse` does, without limiting the depth."""
    numbers: dict[str, Any] = {"parse_constant": _constant, "parse_float": _finite}
    value = json.loads(text, object_pairs_hook=_pairs, **(numbers if finite else {}))
    if "\\u" in text:
        _check_surrogates(value)
    return value


def encode_canonical(value: Any) -> bytes:
    """Encode a value as canonical JSON, to be digested: ASCII, keys sorted, no spaces.

    Raises ValueError for NaN and infinity.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def digest(manifest: Mapping[str, Any]) -> str:
    """Compute the digest of a bundle's manifest without its key `digest`, which holds it."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(encode_canonical(rest)).hexdigest()


def name_problem(name: object) -> str:
    """Explain why a value of the manifest is not a file name below the bundle's folder; "" if it is
    one."""
    if not isinstance(name, str) or not name:
        return "is not a file name"
    if len(name) > LONGEST or any(len(p.encode()) > LONGEST_PART for p in name.split("/")):
        return f"is longer than {LONGEST} characters, or {LONGEST_PART} bytes between two slashes"
    if any(ord(c) < 32 for c in name):
        return "holds a control character"
    pure = PurePosixPath(name)
    if str(pure) != name or not pure.parts:
        return "is not written in its shortest form"
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in pure.parts[0]:
        return "leaves the bundle"
    return ""


def list_entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, lstat) of everything below a bundle's folder except folders.

    Links are not followed. Raises OSError for a folder that cannot be listed.
    """
    waiting = [(str(folder), "")]
    while waiting:
        place, above = waiting.pop()
        with os.scandir(place) as listing:
            for entry in listing:
                name = f"{above}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, f"{name}/"))
                else:
                    yield name, entry.stat(follow_symlinks=False)


def find_unlisted(folder: Path, files: Mapping[str, Any]) -> dict[str, str]:
    """Return {name below the folder: kind, in words} of the files that a bundle's manifest does not
    list."""
    return {
        name: _kind(name, status)
        for name, status in sorted(list_entries(folder))
        if name not in files and name != MANIFEST
    }


def describe_problem(folder: Path, name: str, entry: Mapping[str, Any]) -> str:
    """Return how a bundle's file differs from its entry, {sha256, size}; "" if it does not."""
    path, status = str(folder), None
    try:
        for part in name.split("/"):
            path = os.path.join(path, part)
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                return "is a link, or lies behind one"
        assert status is not None
        if not stat.S_ISREG(status.st_mode):
            return f"is {_kind(name, status)}"
        if status.st_size != entry["size"]:
            return f"has {status.st_size} bytes, the manifest says {entry['size']}"
        with open(path, "rb", buffering=0) as f:
            actual = hashlib.file_digest(f, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as e:
        return f"cannot be read ({e.strerror})"
    return "" if actual == entry["sha256"] else "is damaged: its digest is not the manifest's"


def list_problems(folder: Path) -> tuple[str, list[str]]:
    """Verify a bundle: compare a folder with its manifest.

    Returns (the manifest's digest, or "" if it is wrong; all differences, a sentence each).
    """
    path = folder / MANIFEST
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST:
            return "", [f"{MANIFEST} is missing, not a plain file, or above {LARGEST} bytes"]
        manifest = parse(path.read_bytes())
        actual = digest(manifest)
        files = manifest["files"]
        plain = {
            name: {"sha256": str(entry["sha256"]), "size": int(entry["size"])}
            for name, entry in files.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return "", [f"{MANIFEST} cannot be read ({type(e).__name__}: {e})"]
    if manifest.get("digest") != actual:
        return "", [f"{MANIFEST} is damaged: its digest is {actual[:16]}..., and it says otherwise"]
    differences = [f"{n!r} {why}" for n in plain if (why := name_problem(n))]
    if not differences:
        differences = [
            f"{n} {why}" for n, e in plain.items() if (why := describe_problem(folder, n, e))
        ]
    try:
        differences += [f"{n} is {kind}" for n, kind in find_unlisted(folder, plain).items()]
    except OSError as e:
        differences.append(f"{e.filename} cannot be listed ({e.strerror})")
    return actual, differences or list_unjudged_files(folder, manifest)


def list_unjudged_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Verify a bundle: compare its manifest with the files that the bundle's report.json says were
    judged.

    Returns a sentence per difference. The digest of report.json itself is not checked here.
    """
    if REPORT not in manifest["files"]:
        return []
    try:
        return list_unjudged(manifest, parse((folder / REPORT).read_bytes(), finite=False))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return [f"{REPORT} cannot be read ({type(e).__name__}: {e})"]


def list_unjudged(manifest: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Verify a bundle: compare the manifest with the judged files; return a sentence per
    difference.

    reports: content of report.json, one per target in the recipe's order; a report without `judged`
        (validate/judged.py) is not compared
    """
    kept = [report for report in reports if not report.get("dropped")]
    if all(report.get("judged") is None for report in kept):
        return []
    if len(kept) != len(manifest["engines"]):
        return [f"{REPORT} judges {len(kept)} targets, and there are {len(manifest['engines'])}"]
    differences: list[str] = []
    for engine, report in zip(manifest["engines"], kept, strict=True):
        judged = report.get("judged")
        if judged is not None:
            differences += _list_changed_files(engine, manifest, judged)
            differences += _list_changed_settings(engine, manifest["contract"], judged)
    return list(dict.fromkeys(differences))  # targets share files


def digest_judged_settings(contract: Any, engine: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests that a report's `judged` and the manifest must share.

    {"contract", "opened_with": sha256 of canonical JSON}

    engine: entry of the manifest, or its OPENED_WITH
    """
    values = {"contract": contract, "opened_with": {k: engine.get(k) for k in OPENED_WITH}}
    return {
        name: hashlib.sha256(encode_canonical(value)).hexdigest() for name, value in values.items()
    }


def main(arguments: list[str]) -> int:
    """Verify the bundle named on the command line, print each difference, and return the exit code.

    arguments: [folder of the bundle], or [] for the folder of this file
    """
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    folder = Path(arguments[0]) if arguments else Path(__file__).parent
    actual, differences = list_problems(folder)
    for difference in differences:
        line = f"{folder}: {difference}"  # file names may hold control characters
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))
    if differences:
        return 2
    print(f"{folder}: all files match the manifest, and no others exist. Digest {actual}")
    return 0


def _list_changed_files(
    engine: Mapping[str, Any], manifest: Mapping[str, Any], judged: Mapping[str, Any]
) -> list[str]:
    """List, to verify a bundle, an engine's files that differ from the judged ones."""
    contract = manifest["contract"]
    opened = [contract.get("tokenizer"), contract.get("embedding")]
    files = [section["file"] for section in opened if section and section.get("file")]
    listed = {
        "model": engine["model_files"],
        "engine": [n for n in (engine["engine"], engine.get("timing_cache")) if n],
        "tokenizer": [f"tokenizer/{name}" for name in files],
    }
    if adapters := (contract.get("generation") or {}).get("adapters"):
        listed["adapters"] = [f"adapters/{name}.safetensors" for name in adapters]
    differences = []
    for kind, names in listed.items():
        expected = dict(judged[kind])
        for name in names:
            actual = manifest["files"][name]["sha256"]
            own = expected.pop(PurePosixPath(name).name, None)
            if own is None:
                differences.append(f"{name} was not judged for {engine['target']}")
            elif own != actual:
                differences.append(f"{name} has sha256 {actual}, and the one judged has {own}")
        differences += [
            f"{name} (sha256 {digest}) was judged for {engine['target']}, and is missing"
            for name, digest in expected.items()
        ]
    for name, entry in manifest["files"].items():  # copies for onnxruntime-genai beside the model
        expected, digest = judged["tokenizer"].get(PurePosixPath(name).name), entry["sha256"]
        if name.startswith("model/") and expected not in (None, digest):
            differences.append(f"{name} has sha256 {digest}, and the one judged has {expected}")
    return differences


def _list_changed_settings(
    engine: Mapping[str, Any], contract: Any, judged: Mapping[str, Any]
) -> list[str]:
    """List, to verify a bundle, the differences of contract and settings of an engine from the
    judged ones."""
    titles = {
        "contract": f"{MANIFEST}: contract",
        "opened_with": f"{MANIFEST}: {', '.join(OPENED_WITH)} of {engine['target']}",
    }
    return [
        f"{titles[name]} has sha256 {actual}, and the one judged has {judged[name]}"
        for name, actual in digest_judged_settings(contract, engine).items()
        if actual != judged[name]
    ]


def _check_surrogates(value: Any) -> None:
    """Raise ValueError for a text in a bundle's JSON that UTF-8 cannot encode."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += [*part.values(), *part]
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, str):
            try:
                part.encode("utf-8")
            except UnicodeEncodeError as e:
                code = ord(part[e.start])
                message = f"character {e.start + 1} is the lone surrogate U+{code:04X}"
                raise ValueError(message) from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of a bundle's JSON. Raises ValueError for a duplicate key, which readers
    resolve differently."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key comes twice")
    return fields


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError(f"{text} is infinite as a number of 64 bits")
    return value


def _kind(name: str, status: os.stat_result) -> str:
    """Describe an entry of a bundle's folder for a message."""
    if stat.S_ISLNK(status.st_mode):
        return "a link"
    if stat.S_ISDIR(status.st_mode):
        return "a folder"
    if not stat.S_ISREG(status.st_mode):
        return "not a plain file"
    if name.endswith((".pyc", ".pyo")) or "__pycache__" in PurePosixPath(name).parts:
        return "bytecode that the manifest does not list; remove it"
    return "not in the manifest"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
