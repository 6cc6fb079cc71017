"""Put a finished bundle where the user looks for it: artifacts/<name>/<version>/."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optimizer.atomic import finish
from optimizer.errors import MachineError, RecipeError
from optimizer.harness.manifest import MANIFEST


def publish(bundle: Path, artifacts: Path, name: str, version: str) -> Path:
    """Copy the bundle's folder, and the tar beside it, to artifacts/<name>/; return the folder.

    A reader sees the old version or the new one, each complete, never a mixture: the copy is
    made beside, made durable, and renamed. Killed between the two renames, neither has the
    name; the next run puts it there. What an earlier run left of this version goes: its tar
    when this one has none, and its <version>.failed.
    Raises RecipeError, having touched nothing, when something else than a bundle has the name;
    MachineError when the disk is full or may not be written, and the old version then stays.
    """
    home = artifacts / name
    final, partial, old = home / version, home / f".{version}.partial", home / f".{version}.old"
    tar = bundle.parent / f"{name}-{version}.tar"
    tar_partial = home / f".{tar.name}.partial"
    with _disk_errors_explained(artifacts):
        _check_replaceable(final)
        home.mkdir(parents=True, exist_ok=True)
        if old.exists() and not final.exists():  # killed between the two renames
            os.rename(old, final)
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        tar_partial.unlink(missing_ok=True)
        try:
            _copy(bundle, partial)
            if tar.is_file():
                shutil.copyfile(tar, tar_partial)
            if final.exists():
                os.rename(final, old)
            finish(partial, final)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            tar_partial.unlink(missing_ok=True)
            if old.exists() and not final.exists():
                os.rename(old, final)
            raise
        shutil.rmtree(old, ignore_errors=True)
        if tar_partial.is_file():
            os.replace(tar_partial, home / tar.name)
        else:
            (home / tar.name).unlink(missing_ok=True)
        failed = home / f"{version}.failed"
        if not (failed / MANIFEST).exists():  # with one it is a version of that name
            shutil.rmtree(failed, ignore_errors=True)
    return final


def _check_replaceable(final: Path) -> None:
    if final.exists() and not (final / MANIFEST).is_file():
        raise RecipeError(
            f"what is here is no bundle: it has no {MANIFEST}, and it is not replaced",
            where=str(final),
            fix="Move it away, or give another package.version or --artifacts.",
        )


def _copy(folder: Path, to: Path) -> None:
    """Copy files and folders. Ends at the first error and raises it as it is: shutil.copytree
    goes on after a full disk and reports text, without the error's number."""
    to.mkdir()
    for path in sorted(folder.rglob("*")):
        target = to / path.relative_to(folder)
        if path.is_dir():
            target.mkdir()
        else:
            shutil.copyfile(path, target)


@contextmanager
def _disk_errors_explained(artifacts: Path) -> Iterator[None]:
    """A disk that is full or may not be written is the machine's fault."""
    full = "Free space, or point --artifacts at another disk; finished steps are kept."
    closed = "Point --artifacts at a folder you may write to; finished steps are kept."
    fixes = {
        errno.ENOSPC: full,
        errno.EDQUOT: full,
        errno.EFBIG: full,
        errno.EROFS: closed,
        errno.EACCES: closed,
        errno.EPERM: closed,
    }
    try:
        yield
    except (FileExistsError, NotADirectoryError) as e:
        raise RecipeError(
            "a file stands where a folder is needed",
            where=str(e.filename or artifacts),
            fix="Move it away, or give another --artifacts.",
        ) from e
    except OSError as e:
        if e.errno not in fixes:
            raise
        raise MachineError(
            os.strerror(e.errno).lower(),
            where=str(e.filename2 or e.filename or artifacts),
            fix=fixes[e.errno],
        ) from e
