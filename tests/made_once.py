"""Write equal folders once per process: a tiny model takes half a second to write and load."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any


class Made:
    """Folders of this process. root: where they lie; None outside a run of tests, where each call
    makes its own."""

    root: Path | None = None


def once(make: Callable[..., Any]) -> Callable[..., Path]:
    """Wrap make(folder, ...): for arguments that were there before, copy the folder made then."""
    folders: dict[str, Path] = {}

    @wraps(make)
    def copied(folder: Path, *arguments: Any, **options: Any) -> Path:
        if Made.root is None:
            make(folder, *arguments, **options)
            return folder
        key = repr((arguments, sorted(options.items())))
        if key not in folders:
            made = Made.root / f"{make.__name__}-{len(folders)}"
            make(made, *arguments, **options)
            folders[key] = made
        shutil.copytree(folders[key], folder, dirs_exist_ok=True)
        return folder

    return copied
