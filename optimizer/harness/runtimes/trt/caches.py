"""Cache files of the builder and the runtime."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def timing_cache(config: Any, path: Path | None) -> Any:
    """Give the config of TensorRT's builder, where a bundle builds its engine on this machine, the
    timing cache of `path`, and return the cache.

    A missing or damaged cache, or one of another GPU or version, is replaced by an empty one.
    Returns None if `path` is None.
    """
    if path is None:
        return None
    stored = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(stored)
    # ignore_mismatch=False rejects a cache of another GPU
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def write(path: Path, data: Any) -> None:
    """Write a cache file of TensorRT atomically, because another process may read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(path)
