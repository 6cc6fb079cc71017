"""Engines built on this machine, each once.

    <cache>/<key>/model.engine   the engine; of OpenVINO what it compiled of the portable model
    <cache>/<key>/timing.cache   what its builder timed, for products that time
    <cache>/<key>/built.json     {"sha256", "size": of the engine, "made_from": what the key is of}
    <cache>/<key>.lock           held while it is built
    <cache>/<key>.kernels        what TensorRT-RTX compiled for this GPU when the engine first ran

A folder under its final name is complete: it is written beside, fsynced, then renamed, so a build
killed at any instant leaves nothing that is taken for done. A process that finds another building
waits for it and uses what it made. An engine is code: it is used only when its digest is that of
built.json, and built again when it is not. The cache belongs to whoever owns the folder (mode 700).
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
"""build(engine, timing_cache): write the engine; read and renew the timing cache."""
Say = Callable[[str], None]


def made_from(
    engine: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    machine: Machine,
    version: str,
) -> dict[str, Any]:
    """Everything an engine built here depends on. engine, files: of the manifest; version: of the
    builder. The driver is not in it: a later one runs what an earlier one was there for."""
    gpu = machine.gpu
    return {
        "model": {name: files[name]["sha256"] for name in engine["model_files"]},
        "runtime": [engine["runtime"], version],
        "system": [machine.os, machine.architecture],
        "gpu": [gpu.name, gpu.compute_capability] if gpu else None,
        "fit": {k: v for k, v in engine["fit"].items() if k not in BUILT_WITH},
    }


BUILT_WITH = ("runtime_version", "compute_capabilities", "gpu", "driver_minimum", "runtime_minimum")
"""Keys of a fit that say where the shipped engine was built, not what to build."""


def key(document: Mapping[str, Any]) -> str:
    """Of what `made_from` gives."""
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cached(cache: Path, document: Mapping[str, Any]) -> Path | None:
    """The engine, when it is there and intact."""
    folder = cache / key(document)
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
    """The engine made from `document`; built first where the cache has it not.

    timing_cache: one that was shipped, to start from; it is not changed. say: told when there is
    another process to wait for. Raises CacheError when the cache cannot be written, and
    whatever `build` raises; the cache then holds nothing new.
    """
    engine = cached(cache, document)
    if engine is not None:
        return engine
    name = key(document)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(cache / f"{name}.lock", say):
            engine = cached(cache, document)  # another process may have built it while we waited
            if engine is not None:
                return engine
            partial = cache / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # of a build that was killed
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
            f"the engine cannot be kept ({e})",
            where=str(cache),
            fix="Free some space, or name another folder: --cache FOLDER.",
        ) from e
    return cache / name / ENGINE


def _finish(partial: Path, final: Path, document: Mapping[str, Any]) -> None:
    """Write what was built, and give the folder its final name."""
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
    if final.exists():  # damaged: `cached` did not take it
        shutil.rmtree(final)
    os.rename(partial, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Have the disk hold it. Windows opens no folders."""
    if sys.platform == "win32" and path.is_dir():
        return
    fd = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _lock(path: Path, say: Say | None) -> Iterator[None]:
    """An exclusive lock, released by the system if we die."""
    with path.open("a+b") as f:
        if not try_lock(f):
            if say is not None:
                say("another process is building this engine; waiting for it")
            wait_lock(f)
        yield
