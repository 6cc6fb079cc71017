"""manifest.json: what a bundle is, where it came from, and what it needs. Version 2, UTF-8:

    manifest_version   2; a reader refuses any other
    digest             of everything else here: sha256 of the document without this key as
                       canonical JSON: ASCII (\\uXXXX for the rest), keys sorted, no spaces
    content_digest     of everything that determines answers, equal in two runs of one recipe:
                       sha256 of "<sha256>  contract\\n", that of the contract's canonical JSON, and
                       "<sha256>  <name>\\n" of every file that is not `measured`, sorted by name;
                       with `texts` also "<sha256>  texts\\n"
    name, version      of the product, from the recipe
    verdict, verdicts  "pass", the only verdict that makes a bundle; {target: verdict}
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
    texts              content_digest of the bundle in folder texts, of a task with a second model
    files              {name: {sha256, size, measured}} of every file but this one. measured:
                       reports hold times and engines do not build reproducibly: MEASURED, and
                       nothing else may say so
Names are relative, with forward slashes, below the bundle's folder. Types and bounds: fields.py.
`required` fixes which files must be listed, independent of the manifest. A digest detects damage,
not an attacker, who can compute it again after a change; that takes a signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import fields, tasks
from ..contract import Contract, adapter_file
from ..errors import BundleError
from ..runtimes import table
from ..runtimes.trt.header import fits_entry
from ..schema import refuse
from ..trust.verify import (
    LARGEST,
    MANIFEST,
    REPORT,
    describe_problem,
    digest,
    encode_canonical,
    find_unlisted,
    parse,
)
from . import label_encoder

__all__ = ["MANIFEST", "REPORT", "digest", "encode_canonical"]

VERSION = 2
AGAIN = "Get the bundle again, or package the model again: optimize RECIPE."
REPORTS = ("report.html", REPORT)
TEXTS = label_encoder.FOLDER
"""Folder of a second model: of labels (label_encoder.py), or a bundle of its own (bundle.py)."""
MEASURED = (
    *("engines/", *REPORTS),
    *(f"{TEXTS}/{name}" for name in ("engines/", *REPORTS, MANIFEST)),
)
"""Prefixes of the names of files that differ from run to run."""
IMPORTED = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".pth")
STARTING = "harness/__pycache__/__init__."
"""Prefix of bytecode that a starting process has not removed yet: see __init__.py."""
STARTED = ("harness/__init__.py", "harness/__main__.py", "requirements.txt")


def digest_content(
    contract: Any, files: Mapping[str, Mapping[str, Any]], texts: str | None = None
) -> str:
    """Compute content_digest, the digest of everything that determines a bundle's answers.

    contract, files, texts: fields of the manifest; texts is None without a second model
    """
    lines = [f"{hashlib.sha256(encode_canonical(contract)).hexdigest()}  contract\n"]
    lines += [f"{f['sha256']}  {n}\n" for n, f in sorted(files.items()) if not f["measured"]]
    lines += [f"{texts}  {TEXTS}\n"] if texts else []
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a bundle: version, digest, fields and file names.

    Raises BundleError for a missing manifest, another version, a wrong digest, a field that is
    missing or out of bounds, a file name outside the folder, and a required file not listed.
    """
    path = folder / MANIFEST
    manifest = _parsed(path)
    version = manifest.get("manifest_version")
    if version != VERSION or isinstance(version, bool):
        old = version == 1
        raise BundleError(
            f"manifest_version {version!r:.60} was found"
            + (", whose digest does not cover the contract" if old else ""),
            where=str(path),
            accepted=str(VERSION),
            fix="Package the model again: optimize RECIPE."
            if old
            else "Use the harness inside the bundle.",
        )
    actual = digest(manifest)
    if manifest.get("digest") != actual:
        raise BundleError(
            f"damaged: its digest is {actual[:16]}..., and it says "
            f"{str(manifest.get('digest'))[:16]}...",
            where=str(path),
            fix=f"Something in it was changed after it was packaged. {AGAIN}",
        )
    where = f"{path}: "
    fields.MANIFEST(manifest, where)
    _check_contract(manifest["contract"])
    _check_engines(manifest, where)
    _check_files(manifest, where)
    texts = manifest.get("texts")
    expected = digest_content(manifest["contract"], manifest["files"], texts)
    if manifest["content_digest"] != expected:
        raise BundleError("content_digest is wrong", where=str(path), fix=AGAIN)
    return manifest


def _parsed(path: Path) -> dict[str, Any]:
    """Parse manifest.json. Raises BundleError if it is missing, too large, or not a JSON object."""
    try:
        if not path.exists():
            raise BundleError(
                f"no bundle here: it has no {MANIFEST}",
                where=str(path.parent),
                fix="Give the folder that has it, or the tar of a bundle to check or predict.",
            )
        if path.is_symlink() or not path.is_file():
            raise ValueError("a link, or not a plain file")
        if path.stat().st_size > LARGEST:
            raise ValueError(f"more than {LARGEST:,} bytes")
        manifest = parse(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise BundleError(f"cannot be read ({e})", where=str(path), fix=AGAIN) from None
    if not isinstance(manifest, dict):
        raise BundleError("not a JSON object", where=str(path), fix=AGAIN)
    return manifest


def _check_contract(document: Mapping[str, Any]) -> None:
    """Check the contract in a manifest beyond its fields. An unknown task belongs to another
    package; only its fields are checked."""
    try:
        tasks.find_task(document["task"])
    except KeyError:
        return
    tasks.check(Contract.from_json(document, MANIFEST), MANIFEST)


def _check_engines(manifest: Mapping[str, Any], where: str) -> None:
    """Check in a manifest the fields that each engine's runtime needs, and that targets are
    unique."""
    names = [engine["target"] for engine in manifest["engines"]]
    for i, engine in enumerate(manifest["engines"]):
        at = f"{where}engines[{i}]"
        if names.index(engine["target"]) != i:
            refuse(engine["target"], f"{at}.target", "a name that no other engine has")
        if engine["model"] not in engine["model_files"]:
            refuse(engine["model"], f"{at}.model", "one of model_files")
        if table.look_up(engine["runtime"]).engine_files:
            fields.WITH_SHAPES(engine, at)
            if not engine["deferred"]:
                fields.BUILT_ENGINE(engine, at)


def required(manifest: Mapping[str, Any]) -> dict[str, str]:
    """List the files that a bundle's manifest's `files` must name, {file: field of the manifest
    that uses it}."""
    names = dict.fromkeys(STARTED, "every bundle")
    for i, engine in enumerate(manifest["engines"]):
        used = {
            "model": [engine["model"]],
            "model_files": engine["model_files"],
            "engine": [engine["engine"]],
            "timing_cache": [engine.get("timing_cache")],
        }
        names |= {n: f"engines[{i}].{key}" for key, some in used.items() for n in some if n}
    tokenizer = manifest["contract"].get("tokenizer")
    if tokenizer is not None:
        names[f"tokenizer/{tokenizer['file']}"] = "contract.tokenizer.file"
    layers = (manifest["contract"].get("embedding") or {}).get("file")
    if layers is not None:
        names[f"tokenizer/{layers}"] = "contract.embedding.file"
    if manifest["contract"].get("label_texts") is not None:
        names |= dict.fromkeys(
            (f"{TEXTS}/{n}" for n in (label_encoder.CONTRACT, label_encoder.MODEL)),
            "contract.label_texts",
        )
    if manifest["contract"]["task"] in [t.name for t in tasks.TASKS.values() if t.reads_texts]:
        names[f"{TEXTS}/{MANIFEST}"] = "contract.task"
    adapters = (manifest["contract"].get("generation") or {}).get("adapters", ())
    names |= dict.fromkeys(map(adapter_file, adapters), "contract.generation.adapters")
    return names


def _check_files(manifest: Mapping[str, Any], where: str) -> None:
    """Check in a manifest that all required files are listed, and which are marked as measured.

    Raises BundleError otherwise.
    """
    files = manifest["files"]
    for name, field in required(manifest).items():
        if name not in files:
            raise BundleError(
                f"file {name!r} is used and is not among the files",
                where=f"{where}{field}",
                fix=AGAIN,
            )
    for name, entry in files.items():
        if name == MANIFEST:
            refuse(name, f"{where}files", "every file but the manifest itself")
        if entry["measured"] != name.startswith(MEASURED):
            refuse(
                entry["measured"],
                f"{where}files[{name!r}].measured",
                f"true of {', '.join(MEASURED)}, and false of every other file",
            )


def list_damaged_files(
    folder: Path, manifest: Mapping[str, Any], *, reports: bool = False
) -> frozenset[str]:
    """Return the names of a bundle's damaged files.

    Damaged: missing, a link, of another size or digest, or an engine whose header contradicts its
    entry.

    reports: True includes reports, which no engine computes with
    """
    names = [n for n in manifest["files"] if reports or n not in REPORTS]
    damaged = {n for n in names if not is_intact(folder, n, manifest["files"][n])}
    for engine in manifest["engines"]:
        name, names_gpus = engine["engine"], table.look_up(engine["runtime"]).compute_capabilities
        if name and names_gpus and not engine["deferred"] and name not in damaged:
            damaged |= set() if fits_entry(folder / name, engine["fit"]) else {name}
    return frozenset(damaged)


def is_intact(folder: Path, name: str, entry: Mapping[str, Any]) -> bool:
    """Return True if a bundle's file exists, is not a link, and has the size and digest of its
    entry."""
    return not describe_problem(folder, name, entry)


def list_unlisted_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of files, links and bytecode that are in a bundle's folder and not in the
    manifest."""
    try:
        return sorted(find_unlisted(folder, manifest["files"]))
    except OSError as e:
        raise BundleError(f"cannot be listed ({e.strerror})", where=str(e.filename)) from None


def refuse_damage(folder: Path, manifest: Mapping[str, Any]) -> frozenset[str]:
    """Refuse a damaged bundle, unless only files of engines are damaged.

    Returns the damaged files of engines, for fit.py to decide, because another engine may run.

    Raises BundleError for damage to another file, and for an unlisted file that might be read: a
    file in a folder of listed files, or an importable file at the top. `check` reports other
    unlisted files, such as notes.
    """
    damaged = list_damaged_files(folder, manifest)
    owned = {
        n
        for e in manifest["engines"]
        for n in (*e["model_files"], e["engine"], e.get("timing_cache"))
    }
    shared = sorted(damaged - owned)
    if shared:
        raise BundleError(f"damaged or missing: {', '.join(shared)}", where=str(folder), fix=AGAIN)
    folders = {n.partition("/")[0] for n in manifest["files"] if "/" in n}
    strays = [
        n
        for n in list_unlisted_files(folder, manifest)
        if n.partition("/")[0] in folders or ("/" not in n and n.endswith(IMPORTED))
        if not n.startswith(STARTING)
    ]
    if strays:
        raise BundleError(
            f"not in the manifest: {', '.join(strays)}",
            where=str(folder),
            fix="Move them away, or get the bundle again.",
        )
    return damaged


def read_reports(folder: Path, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read the reports of all targets of a bundle. Raises BundleError if report.json is missing,
    damaged or has a wrong field."""
    path, entry = folder / REPORT, manifest["files"].get(REPORT)
    if entry is None or not is_intact(folder, REPORT, entry):
        raise BundleError(f"damaged or missing: {REPORT}", where=str(folder), fix=AGAIN)
    try:
        document = parse(path.read_bytes(), finite=False)
    except (OSError, ValueError, RecursionError) as e:
        raise BundleError(f"cannot be read ({e})", where=str(path), fix=AGAIN) from None
    fields.REPORTS(document, f"{path}: ")
    return list(document)
