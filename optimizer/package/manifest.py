"""manifest.json: what a bundle is, where it came from, and what it needs.

Version 1, UTF-8, keys sorted:
    manifest_version   1; a reader refuses any other
    name, version      of the product, from the recipe
    digest             of the bundle: sha256 of the lines "<sha256>  <name>\\n", sorted by name,
                       of every file whose `measured` is false. The same recipe on the same
                       package versions gives the same digest.
    verdict            "pass": a bundle is made of nothing else; verdicts: {target: verdict}
    dropped            [{target, gate, message}]: targets whose on_fail is drop and whose gates did
                       not pass: the first of the worst of them. Nothing of these is in the bundle
                       but their reports
    source             {source, revision, files: {name: {sha256, size}}, ...}: the checkpoint
    licence            SPDX id of the model, or ""; licence_files: [name]
    recipe             the recipe, complete with every default
    calibration        {use: sha256 of the rows}: calibrate, validate, ...
    packages           {distribution: version} that made it
    runnable           whether the harness in the bundle runs any of the engines' runtimes
    contract           inputs, outputs, tokenizer, task: harness/contract.py
    engines            in the recipe's order, which is the order they are tried in:
        target         "onnxruntime-cpu": the name of its folders
        runtime, device, threads
        model          the portable ONNX; model_files: [it and its external data]
        engine         file | null: onnxruntime runs the ONNX itself and has none
        deferred       true: not built, or not opened, where the bundle was made; why
        provider       null, or ONNX Runtime's "tensorrt" | "tensorrt-rtx" on a GPU
        timing_cache   null, or the file a builder's timings were kept in: a rebuild starts there
        fit            what a machine must have, read by harness/fit_columns.py:
                       runtime_minimum; driver_minimum (of a GPU); and of an engine os,
                       architecture, shapes ({axis: [min, opt, max]}, or a list of them), the
                       options it was built with and, once built, runtime_version,
                       compute_capabilities ["89"] and gpu (its name, where that binds it)
        fallbacks      modules that run wider than the recipe asked, accepted there
    files              {name: {sha256, size, measured}} of every file but this one. measured:
                       reports hold times and TensorRT does not build reproducibly, so these
                       bytes differ between two runs of one recipe
Names are relative, with forward slashes, below the bundle's folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.harness.bundle import MANIFEST, VERSION
from optimizer.store import digest_file

MEASURED = ("engines/", "report.html", "report.json")


def files(bundle: Path) -> dict[str, dict[str, Any]]:
    """The `files` of every file below the folder but the manifest, sorted by name."""
    names = sorted(p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file())
    return {
        name: {
            "sha256": digest_file(bundle / name),
            "size": (bundle / name).stat().st_size,
            "measured": name.startswith(MEASURED),
        }
        for name in names
        if name != MANIFEST
    }


def digest(listed: Mapping[str, Mapping[str, Any]]) -> str:
    """The bundle's digest, from `files`."""
    lines = [f"{f['sha256']}  {n}\n" for n, f in sorted(listed.items()) if not f["measured"]]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write(bundle: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """Write manifest.json over what is in the folder now, and return it.

    document: everything but manifest_version, files and digest, which are computed here.
    """
    listed = files(bundle)
    manifest = {
        "manifest_version": VERSION,
        **document,
        "files": listed,
        "digest": digest(listed),
    }
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)
    (bundle / MANIFEST).write_text(text, encoding="utf-8")
    return manifest
