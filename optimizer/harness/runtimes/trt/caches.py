"""Files that a builder or a runtime keeps for its next start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def timing_cache(config: Any, path: Path | None) -> Any:
    """Give a builder's configuration its measurements so far, from `path` when it is there. What
    another GPU or version measured, and what is damaged, is not taken, and measured again."""
    if path is None:
        return None
    stored = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(stored)
    # ignore_mismatch is False: those of another GPU are refused
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def write(path: Path, data: Any) -> None:
    """At once: another process may be reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(path)
