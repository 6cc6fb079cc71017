"""Put the bundle of a run into artifacts/<name>/<version>/.

Two runs at once are as good as one after the other: each version of a name has a lock. What goes
there is written in a private folder beside, made durable, and then renamed, so that a reader sees
the old or the new one, each complete, and a run that is killed leaves nothing half-written. The
next run removes what it left beside.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from optimizer.foundation import atomic
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.progress import say
from optimizer.harness.bundle.manifest import MANIFEST
from optimizer.harness.process.temporary import private_folder

REPORT = "report.html"
REPORT_FILES = frozenset({REPORT, "report.json"})


def publish(bundle: Path, artifacts: Path, name: str, version: str) -> Path:
    """Copy the bundle's folder and its tar to artifacts/<name>/; return the folder.

    A bundle that is there already, with the same bytes, stays as it is; another one of this version
    is replaced. What an earlier run left of the version goes: its tar when this one has none, and
    the report of a failed run. Raises RecipeError, having touched nothing, when something else than
    a bundle has the name; MachineError when the disk is full or may not be written, and the old
    version then stays.
    """
    final = artifacts / name / version
    tar = bundle.parent / f"{name}-{version}.tar"
    with _place(artifacts, name, version) as work:
        new, new_tar = work / "bundle", work / "tar"
        present, tar_present = _same_files(bundle, final), _same_tar(tar, final.parent / tar.name)
        if not present:
            _copy(bundle, new)
        if not tar_present and tar.is_file():
            shutil.copyfile(tar, new_tar)
            atomic.sync(new_tar)
        if present:
            say(f"publish: {final} is this bundle already")
        elif final.exists():
            say(f"publish: {final} is replaced")
        if not present:
            atomic.replace(new, final)
        if new_tar.is_file():
            os.replace(new_tar, final.parent / tar.name)
        elif not tar_present:
            (final.parent / tar.name).unlink(missing_ok=True)
        failed = _failed(final)
        if _is_report(failed):
            os.rename(failed, work / "failed")
        atomic.sync(final.parent)
    return final


def publish_failed(files: Mapping[str, str], artifacts: Path, name: str, version: str) -> Path:
    """Write the report of a run whose gates did not pass to artifacts/<name>/<version>.failed/;
    return its report.html. Raises as `publish` does.

    files: {"report.html": text, "report.json": text}.
    """
    final = _failed(artifacts / name / version)
    with _place(artifacts, name, version) as work:
        if os.path.lexists(final) and not _is_report(final):
            raise RecipeError(
                "the folder is not the report of a failed run, and it is not replaced",
                where=str(final),
                fix="Move it away, or give another package.version or --artifacts.",
            )
        new = work / "report"
        new.mkdir()
        for file, text in files.items():
            (new / file).write_text(text, encoding="utf-8")
        atomic.replace(new, final)
    return final / REPORT


@contextmanager
def _place(artifacts: Path, name: str, version: str) -> Iterator[Path]:
    """A private folder beside the version, which nobody else changes meanwhile."""
    home = artifacts / name
    final = home / version
    with _disk_errors_explained(artifacts):
        _check_replaceable(final)
        home.mkdir(parents=True, exist_ok=True)
        with atomic.lock(artifacts / f".{name}-{version}.lock"):
            if (atomic.set_aside(final) / MANIFEST).is_file():
                atomic.restore(final)
            _check_replaceable(final)
            with private_folder(home, ".optimize-publish") as work:
                _remove_leftovers(final, f"{name}-{version}.tar")
                yield work


def _failed(final: Path) -> Path:
    return final.with_name(f"{final.name}.failed")


def _is_report(folder: Path) -> bool:
    """Return True for a folder that holds only files of `publish_failed`."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return {p.name for p in folder.iterdir()} <= REPORT_FILES


def _remove_leftovers(final: Path, tar: str) -> None:
    """Of a run that was killed between two renames, or of one before private folders."""
    home = final.parent
    for old in (f".{final.name}.partial", f".{tar}.partial", f"{final.name}.failed.partial"):
        atomic.remove(home / old)
    for place in (final, _failed(final)):
        atomic.remove(atomic.set_aside(place))


def _check_replaceable(final: Path) -> None:
    if final.exists() and not (final / MANIFEST).is_file():
        raise RecipeError(
            f"the folder is not a bundle: it has no {MANIFEST}, and it is not replaced",
            where=str(final),
            fix="Move it away, or give another package.version or --artifacts.",
        )


def _same_files(folder: Path, other: Path) -> bool:
    """Return True for two folders with the same names and bytes, and without links."""
    names = _names(folder)
    if names != _names(other) or any((other / n).is_symlink() for n in [*names, "."]):
        return False
    return all(
        (folder / n).is_dir() == (other / n).is_dir()
        and ((folder / n).is_dir() or filecmp.cmp(folder / n, other / n, shallow=False))
        for n in names
    )


def _names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def _same_tar(tar: Path, other: Path) -> bool:
    """Return True for two equal files, or where both are missing."""
    if not (tar.is_file() and other.is_file()) or other.is_symlink():
        return not tar.is_file() and not os.path.lexists(other)
    return filecmp.cmp(tar, other, shallow=False)


def _copy(folder: Path, to: Path) -> None:
    """Copy files and folders. Ends at the first error and raises it as it is: shutil.copytree
    continues after a full disk and reports text, without the error's number."""
    to.mkdir()
    for path in sorted(folder.rglob("*")):
        target = to / path.relative_to(folder)
        if path.is_dir():
            target.mkdir()
        else:
            shutil.copyfile(path, target)


@contextmanager
def _disk_errors_explained(artifacts: Path) -> Iterator[None]:
    """A full or closed disk is the machine's fault; a file in the way is not."""
    with atomic.disk_errors_explained(artifacts, "--artifacts"):
        try:
            yield
        except (FileExistsError, NotADirectoryError) as e:
            raise RecipeError(
                "a file stands where a folder is needed",
                where=str(e.filename or artifacts),
                fix="Move it away, or give another --artifacts.",
            ) from e
