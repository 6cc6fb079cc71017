"""Cache of engines built on this machine.

    <cache>/<key>/model.engine   the engine; for OpenVINO, the compiled portable model
    <cache>/<key>/timing.cache   kernel timings of the builder, for products that time
    <cache>/<key>/built.json     {"sha256", "size" of the engine, "made_from": content of the key}
    <cache>/<key>.lock           locked while the engine is built
    <cache>/<key>.kernels        kernels that TensorRT-RTX compiled when the engine first ran

A folder under its final name is complete: it is written under another name, fsynced and renamed, so
a killed build leaves no incomplete engine. A process that finds another one building waits and uses
its engine. An engine is code: it is used only if its digest matches built.json, else built again.
The cache belongs to the owner of the folder (mode 700).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import CacheError
from ..process.file_lock import try_lock, wait_lock
from ..runtimes.machine import Machine

ENGINE, TIMING, BUILT = "model.engine", "timing.cache", "built.json"

Build = Callable[[Path, Path], object]
"""build(engine, timing_cache): write the engine; read and update the timing cache."""
Say = Callable[[str], None]


def describe_origin(
    engine: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    machine: Machine,
    version: str,
) -> dict[str, Any]:
    """Return everything that a bundle's engine built here depends on; its hash is the cache key.

    The driver is left out, because a later driver runs the same engine.

    engine: the engine's entry in the manifest
    files: the manifest's `files`
    version: version of the builder
    """
    gpu = machine.gpu
    return {
        "model": {name: files[name]["sha256"] for name in engine["model_files"]},
        "runtime": [engine["runtime"], version],
        "system": [machine.os, machine.architecture],
        "gpu": [gpu.name, gpu.compute_capability] if gpu else None,
        "fit": {k: v for k, v in engine["fit"].items() if k not in BUILT_WITH},
    }


BUILT_WITH = ("runtime_version", "compute_capabilities", "gpu", "driver_minimum", "runtime_minimum")
"""Keys of a fit that describe where the shipped engine was built, not what to build."""


def name_engine_folder(document: Mapping[str, Any]) -> str:
    """Return the name of an engine's folder in the cache: the hash of its origin.

    document: result of `describe_origin`
    """
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find_cached(cache: Path, document: Mapping[str, Any]) -> Path | None:
    """Return the path of the intact cached engine with this origin; None without one.

    document: result of `describe_origin`
    """
    folder = cache / name_engine_folder(document)
    try:
        built = json.loads((folder / BUILT).read_text(encoding="utf-8"))
        with (folder / ENGINE).open("rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
        recorded = built["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder / ENGINE if digest == recorded else None


def obtain(
    cache: Path,
    document: Mapping[str, Any],
    build: Build,
    *,
    timing_cache: Path | None = None,
    say: Say | None = None,
) -> Path:
    """Return the path of the cached engine of a bundle with this origin, after building it if
    necessary.

    document: result of `describe_origin`
    build: function that builds the engine
    timing_cache: shipped timing cache to start from; it is not changed; None: none
    say: receives a line if another process must be waited for

    Raises CacheError if the cache cannot be written, and the errors of `build`; the cache is then
    unchanged.
    """
    engine = find_cached(cache, document)
    if engine is not None:
        return engine
    name = name_engine_folder(document)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(cache / f"{name}.lock", say):
            engine = find_cached(
                cache, document
            )  # another process may have built it while we waited
            if engine is not None:
                return engine
            partial = cache / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed build
            partial.mkdir(mode=0o700)
            try:
                if timing_cache is not None:
                    shutil.copyfile(timing_cache, partial / TIMING)
                build(partial / ENGINE, partial / TIMING)
                _finish(partial, cache / name, document)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as e:
        raise CacheError(
            f"the engine cannot be cached ({e})",
            where=str(cache),
            fix="Free some space, or name another folder: --cache FOLDER.",
        ) from e
    return cache / name / ENGINE


def _finish(partial: Path, final: Path, document: Mapping[str, Any]) -> None:
    """Complete the folder of a bundle's engine in the cache: write built.json, and give the folder
    its final name."""
    with (partial / ENGINE).open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    built = {
        "sha256": digest,
        "size": (partial / ENGINE).stat().st_size,
        "made_from": dict(document),
    }
    text = json.dumps(built, indent=1, sort_keys=True)
    (partial / BUILT).write_text(text, encoding="utf-8")
    for path in (*partial.iterdir(), partial):
        _sync(path)
    if final.exists():  # damaged: `find_cached` refused it
        shutil.rmtree(final)
    os.rename(partial, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Flush a file or folder of the engine cache to disk. Windows cannot open folders."""
    if sys.platform == "win32" and path.is_dir():
        return
    fd = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _lock(path: Path, say: Say | None) -> Iterator[None]:
    """Hold an exclusive lock on a file, so that one process builds a bundle's engine; the system
    releases it if this process dies."""
    with path.open("a+b") as f:
        if not try_lock(f):
            if say is not None:
                say("another process is building this engine; waiting for it")
            wait_lock(f)
        yield
