"""Put the bundle of a run into artifacts/<name>/<version>/.

A lock per version orders simultaneous runs. Files are written into a private folder beside the
final one, synced, and renamed: a reader sees the old or the new bundle, each complete, also after a
killed run, whose leftovers the next run removes.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from optimizer.foundation import atomic
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.progress import say
from optimizer.harness.bundle.manifest import MANIFEST
from optimizer.harness.process.temporary import make_private_folder

REPORT = "report.html"
REPORT_FILES = frozenset({REPORT, "report.json"})


def publish(bundle: Path, artifacts: Path, name: str, version: str) -> Path:
    """Publish a run's bundle on this disk, as artifacts/<name>/ with its tar; return the folder.

    A bundle with the same bytes stays as it is; another bundle of this version is replaced, and an
    old tar and the report of a failed run are removed.

    Raises RecipeError for a folder of this name that is not a bundle, MachineError for a disk that
    is full or read-only; the old version then stays.
    """
    final = artifacts / name / version
    tar = bundle.parent / f"{name}-{version}.tar"
    with _lock_version(artifacts, name, version) as work:
        new, new_tar = work / "bundle", work / "tar"
        present, tar_present = (
            _have_same_files(bundle, final),
            _is_same_tar(tar, final.parent / tar.name),
        )
        if not present:
            _copy(bundle, new)
        if not tar_present and tar.is_file():
            atomic.copy(tar, new_tar)
            atomic.sync(new_tar)
        if present:
            say(f"publish: {final} holds this bundle already")
        elif final.exists():
            say(f"publish: {final} is replaced")
        if not present:
            atomic.replace(new, final)
        if new_tar.is_file():
            os.replace(new_tar, final.parent / tar.name)
        elif not tar_present:
            (final.parent / tar.name).unlink(missing_ok=True)
        failed = _failed_folder(final)
        if _is_report(failed):
            os.rename(failed, work / "failed")
        atomic.sync(final.parent)
    return final


def publish_failed(files: Mapping[str, str], artifacts: Path, name: str, version: str) -> Path:
    """Write the report of a failed run to artifacts/<name>/<version>.failed/; return its HTML file.

    files: {"report.html": text, "report.json": text}.

    Raises as `publish` does.
    """
    final = _failed_folder(artifacts / name / version)
    with _lock_version(artifacts, name, version) as work:
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
def _lock_version(artifacts: Path, name: str, version: str) -> Iterator[Path]:
    """Lock artifacts/<name>/<version>, where a bundle is published on this disk, and yield an empty
    folder, in which the caller writes the bundle.

    The folder lies beside that of the version, so that it can be renamed to it. Raises
    RecipeError where a folder of that name lacks a manifest.
    """
    home = artifacts / name
    final = home / version
    with _explain_disk_errors(artifacts):
        _check_replaceable(final)
        home.mkdir(parents=True, exist_ok=True)
        with atomic.lock(artifacts / f".{name}-{version}.lock"):
            if (atomic.set_aside(final) / MANIFEST).is_file():
                atomic.restore(final)
            _check_replaceable(final)
            with make_private_folder(home, ".optimize-publish") as work:
                _remove_leftovers(final, f"{name}-{version}.tar")
                yield work


def _failed_folder(final: Path) -> Path:
    return final.with_name(f"{final.name}.failed")


def _is_report(folder: Path) -> bool:
    """Return True for a folder that holds only what `publish_failed` writes: the report of a failed
    run."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return {p.name for p in folder.iterdir()} <= REPORT_FILES


def _remove_leftovers(final: Path, tar: str) -> None:
    """Remove what runs that were killed while publishing left in artifacts/<name>/, also files of
    older releases of this program."""
    home = final.parent
    for old in (f".{final.name}.partial", f".{tar}.partial", f"{final.name}.failed.partial"):
        atomic.remove(home / old)
    for place in (final, _failed_folder(final)):
        atomic.remove(atomic.set_aside(place))


def _check_replaceable(final: Path) -> None:
    if final.exists() and not (final / MANIFEST).is_file():
        raise RecipeError(
            f"the folder is not a bundle: it has no {MANIFEST}, and it is not replaced",
            where=str(final),
            fix="Move it away, or give another package.version or --artifacts.",
        )


def _have_same_files(folder: Path, other: Path) -> bool:
    """Compare a bundle with the one published before: return True for folders with the same names
    and bytes, and without links."""
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


def _is_same_tar(tar: Path, other: Path) -> bool:
    """Compare a bundle's tar with the published one: return True if both are equal or both missing;
    False for a link."""
    if not (tar.is_file() and other.is_file()) or other.is_symlink():
        return not tar.is_file() and not os.path.lexists(other)
    return filecmp.cmp(tar, other, shallow=False)


def _copy(folder: Path, to: Path) -> None:
    """Copy a bundle to where it is published; raise the first OSError unchanged, which
    shutil.copytree does not."""
    to.mkdir()
    for path in sorted(folder.rglob("*")):
        target = to / path.relative_to(folder)
        if path.is_dir():
            target.mkdir()
        else:
            atomic.copy(path, target)


@contextmanager
def _explain_disk_errors(artifacts: Path) -> Iterator[None]:
    """Raise errors of the disk, met while a bundle is published, as MachineError where it is full
    or read-only, and as RecipeError where a file has the name of a folder that publishing makes."""
    with atomic.explain_disk_errors(artifacts, "--artifacts"):
        try:
            yield
        except (FileExistsError, NotADirectoryError) as e:
            raise RecipeError(
                "a file exists where a folder is needed",
                where=str(e.filename or artifacts),
                fix="Move it away, or give another --artifacts.",
            ) from e
