"""Unpack a bundle's tar without trusting it."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from ..errors import BundleError, MachineError
from .verify import name_problem

MEMBERS = 100_000
PLAIN = "a plain tar, not compressed, with one folder in it, as `optimize` writes it"
AGAIN = "Do not unpack it; get it again."


def unpack(tar: Path, into: Path) -> Path:
    """Extract a bundle into the new folder `into`, which appears complete or not at all.

    The single top folder of the tar is dropped. Raises BundleError before anything is written:
    `into` exists; the tar is truncated; a member is a link, a device or a sparse file (which may be
    larger than the tar); it lies outside the top folder or comes twice; its name is absolute, too
    long or contains "..". Raises MachineError if the disk is full.
    """
    if into.exists():
        raise BundleError("the folder already exists", where=str(into), fix="Choose another name.")
    partial = into.with_name(into.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with tarfile.open(tar, "r:") as archive:
            members = _members(archive, tar)
            # the filter is missing before Python 3.11.4; _members is stricter
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            partial.mkdir()
            archive.extractall(partial, members)
        os.rename(partial, into)
    except (tarfile.TarError, EOFError, ValueError) as e:
        raise BundleError(f"not a complete tar ({e})", where=str(tar), accepted=PLAIN) from None
    except OSError as e:
        raise MachineError(f"it cannot be unpacked ({e.strerror})", where=str(tar)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return into


def _members(archive: tarfile.TarFile, tar: Path) -> list[tarfile.TarInfo]:
    """List the files in a bundle's tar, named below the top folder. Raises BundleError; writes
    nothing."""
    members: dict[str, tarfile.TarInfo] = {}
    folders: set[str] = set()
    top, room = "", tar.stat().st_size
    for i, member in enumerate(archive):
        path = PurePosixPath(member.name)
        name = str(PurePosixPath(*path.parts[1:]))
        room -= member.size
        above = {str(p) for p in PurePosixPath(name).parents}
        why = ""
        if not (member.isdir() or member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)):
            why = "is neither a file nor a folder"
        elif member.issparse() or room < 0:
            why = "is sparse: its declared size exceeds the tar"
        elif path.is_absolute() or not path.parts or top not in ("", path.parts[0]):
            why = "is not in the tar's one folder"
        elif len(path.parts) == 1 and not member.isdir():
            why = "is not in a folder"
        elif len(path.parts) > 1:
            why = name_problem(name)
            if name in members or (name in folders and not member.isdir()):
                why = "comes twice"
            elif any(a in members and not members[a].isdir() for a in above):
                why = "lies below a file"
        if not why and i >= MEMBERS:
            why = f"is one of more than {MEMBERS:,}"
        if why:
            shown = f"{member.name!r:.200}"
            raise BundleError(f"member {shown} {why}", where=str(tar), accepted=PLAIN, fix=AGAIN)
        top = path.parts[0]
        folders |= above
        if len(path.parts) > 1:
            members[name] = member.replace(name=name)
    _check_end(archive)
    return list(members.values())


def _check_end(archive: tarfile.TarFile) -> None:
    """Raise ReadError unless a bundle's tar ends in a block of zeros. tarfile takes a damaged
    header, or a truncation between two members, for the end."""
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("it does not end as a tar does")
