"""manifest.json: what a bundle is, where it came from, and what it needs. Version 2, UTF-8:

    manifest_version   2; a reader refuses any other
    digest             of everything else here: sha256 of the document without this key as
                       canonical JSON: ASCII (\\uXXXX for the rest), keys sorted, no spaces
    content_digest     of what answers, alike in two runs of one recipe with the same packages:
                       sha256 of "<sha256>  contract\\n", that of the contract's canonical JSON, and
                       "<sha256>  <name>\\n" of every file that is not `measured`, sorted by name
    name, version      of the product, from the recipe
    verdict, verdicts  "pass": a bundle is made of nothing else; {target: verdict}
    dropped            [{target, gate, message}]: left out by on_fail: drop, but for their reports
    source             {source, revision, files: {name: {sha256, size}}, ...}: the checkpoint
    licence            SPDX id of the model, or ""; licence_files: [name]
    recipe             the recipe, complete with every default
    calibration        {use: sha256 of the rows}; packages: {distribution: version} that made it
    runnable           whether the harness in the bundle runs any of the engines' runtimes
    contract           inputs, outputs, tokenizer, task: contract.py
    engines            in the recipe's order, which is the order they are tried in: target (the
                       name of its folders), runtime, device, threads, provider (null, or of ONNX
                       Runtime); model, model_files (the portable ONNX, with its external data);
                       engine (file, or null: the ONNX is run), timing_cache (file or null);
                       deferred, why (not built where the bundle was made); fallbacks (modules in
                       higher precision than the recipe asked); fit: what a machine must have, read
                       by fit_columns.py: runtime_minimum, driver_minimum, os, architecture, shapes
                       ({axis: [min, opt, max]}, or a list of them), the builder's options and,
                       once built, runtime_version, compute_capabilities ["89"], gpu
    files              {name: {sha256, size, measured}} of every file but this one. measured:
                       reports hold times and engines do not build reproducibly
Names are relative, with forward slashes, below the bundle's folder. A digest shows damage and
carelessness; it is no signature: whoever rewrites the manifest can compute it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import BundleError

MANIFEST = "manifest.json"
VERSION = 2
AGAIN = "Get the bundle again, or package the model again: optimize RECIPE."


def canonical(value: Any) -> bytes:
    """Canonical JSON, see the module's docstring. Raises ValueError for NaN and infinity."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def digest(manifest: Mapping[str, Any]) -> str:
    """The manifest's digest, whatever its `digest` says."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(canonical(rest)).hexdigest()


def content_digest(contract: Any, files: Mapping[str, Mapping[str, Any]]) -> str:
    """The digest of what answers, from the manifest's `contract` and `files`."""
    lines = [f"{hashlib.sha256(canonical(contract)).hexdigest()}  contract\n"]
    lines += [f"{f['sha256']}  {n}\n" for n, f in sorted(files.items()) if not f["measured"]]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle: its version, its digest and its file names checked.

    Raises BundleError: no manifest, another version, a digest that is not its content's, or a
    name that leaves the folder.
    """
    path = folder / MANIFEST
    manifest = _parsed(path)
    version = manifest.get("manifest_version")
    if version != VERSION:
        old = version == 1
        raise BundleError(
            f"manifest_version {version!r} was found"
            + (", whose digest does not cover the contract" if old else ""),
            where=str(path),
            accepted=str(VERSION),
            fix="Package the model again: optimize RECIPE."
            if old
            else "Use the harness inside the bundle.",
        )
    if manifest.get("digest") != digest(manifest):
        raise BundleError(
            f"damaged: its digest is {digest(manifest)[:16]}..., and it says "
            f"{str(manifest.get('digest'))[:16]}...",
            where=str(path),
            fix=f"Something in it was changed after it was packaged. {AGAIN}",
        )
    _check_names(manifest, path)
    return manifest


def _parsed(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(
            path.read_bytes().decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_constant
        )
    except (OSError, ValueError, RecursionError) as e:
        raise BundleError(
            f"no bundle here ({e})",
            where=str(path.parent),
            fix="Give the folder that has manifest.json.",
        ) from None
    if not isinstance(manifest, dict):
        raise BundleError("not a JSON object", where=str(path), fix=AGAIN)
    return manifest


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. A key that comes twice means one thing to one reader and another to the next."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key comes twice")
    return fields


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _check_names(manifest: Mapping[str, Any], path: Path) -> None:
    """Raises BundleError for a manifest without its parts, or a file that is elsewhere."""
    try:
        files = manifest["files"]
        names = list(files)
        for entry in files.values():
            _ = entry["sha256"], entry["size"], entry["measured"]
        for engine in manifest["engines"]:
            names += [*engine["model_files"], engine["model"]]
            names += [n for n in (engine["engine"], engine.get("timing_cache")) if n]
        tokenizer = manifest["contract"]["tokenizer"]
        names += [f"tokenizer/{tokenizer['file']}"] if tokenizer is not None else []
        content = content_digest(manifest["contract"], files)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise BundleError(f"incomplete ({e!r} is missing)", where=str(path), fix=AGAIN) from None
    for name in names:
        pure = PurePosixPath(str(name))
        if pure.is_absolute() or ".." in pure.parts or "\\" in str(name):
            raise BundleError(f"file {name!r} leaves the bundle", where=str(path))
        if name not in files:
            raise BundleError(f"file {name!r} is used and is not among the files", where=str(path))
    if manifest.get("content_digest") != content:
        raise BundleError("content_digest is of another bundle", where=str(path), fix=AGAIN)


def damaged_files(
    folder: Path, manifest: Mapping[str, Any], *, measured: bool = False
) -> frozenset[str]:
    """Names of files that are missing, are links, or have not the manifest's size and digest.

    measured: look at reports too, which nothing computes with.
    """
    wrong = set()
    for name, entry in manifest["files"].items():
        if entry.get("measured") and not measured and not name.startswith("engines/"):
            continue
        if not intact(folder, name, entry):
            wrong.add(name)
    return frozenset(wrong)


def intact(folder: Path, name: str, entry: Mapping[str, Any]) -> bool:
    """Whether one file is there, is no link, and has the size and digest of its entry."""
    path = folder / name
    if _is_link(folder, name) or not path.is_file() or path.stat().st_size != entry["size"]:
        return False
    try:
        with path.open("rb") as f:
            actual = hashlib.file_digest(f, "sha256").hexdigest()
    except OSError:  # it cannot be read
        return False
    return bool(actual == entry["sha256"])


def unlisted_files(folder: Path, manifest: Mapping[str, Any], below: str = "") -> list[str]:
    """Files in the folder that the manifest does not know; Python's caches do not count.

    below: look in this folder of the bundle only.
    """
    present = (p.relative_to(folder) for p in (folder / below).rglob("*") if not p.is_dir())
    return sorted(
        p.as_posix()
        for p in present
        if p.as_posix() not in {*manifest["files"], MANIFEST} and "__pycache__" not in p.parts
    )


def _is_link(folder: Path, name: str) -> bool:
    parts = PurePosixPath(name).parts
    return any((folder.joinpath(*parts[: i + 1])).is_symlink() for i in range(len(parts)))
