"""Put a finished bundle where the user looks for it: artifacts/<name>/<version>/."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from optimizer.store import finish


def publish_local(bundle: Path, artifacts: Path, name: str, version: str) -> Path:
    """Copy the bundle's folder, and the tar beside it, to artifacts/<name>/; return the folder.

    A reader sees the old version or the new one, each complete, never a mixture: the copy is
    made beside, made durable, and renamed. Killed between the two renames, neither has the
    name; the next run puts it there.
    """
    home = artifacts / name
    home.mkdir(parents=True, exist_ok=True)
    final, partial, old = home / version, home / f".{version}.partial", home / f".{version}.old"
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(bundle, partial)
    if final.exists():
        os.rename(final, old)
    finish(partial, final)
    shutil.rmtree(old, ignore_errors=True)
    tar = bundle.parent / f"{name}-{version}.tar"
    if tar.is_file():
        beside = home / f".{tar.name}.partial"
        shutil.copyfile(tar, beside)
        os.replace(beside, home / tar.name)
    return final
