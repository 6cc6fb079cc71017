"""Unpack a bundle's tar without trusting it."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from .errors import BundleError


def unpack(tar: Path, into: Path) -> Path:
    """Extract a bundle into the new folder `into`, which appears complete or not at all.

    The single top folder of the tar is dropped. Raises BundleError, before anything is written,
    for a member that is no plain file or folder (a link, a device) or whose name is absolute or
    contains "..", and when `into` exists.
    """
    if into.exists():
        raise BundleError("the folder exists", where=str(into), fix="Give a new name.")
    partial = into.with_name(into.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with tarfile.open(tar) as archive:
            members = [m.replace(name=_safe_name(m, tar)) for m in archive.getmembers()]
            # Python 3.11 has the filter from its fourth patch on; _safe_name refuses more
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(partial, members)
    except (tarfile.TarError, EOFError) as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise BundleError(f"not a complete tar ({e})", where=str(tar)) from None
    os.rename(partial, into)
    return into


def _safe_name(member: tarfile.TarInfo, tar: Path) -> str:
    """The member's name below the top folder."""
    name = PurePosixPath(member.name)
    if not (member.isfile() or member.isdir()):
        problem = "is neither a file nor a folder"
    elif name.is_absolute() or ".." in name.parts or "\\" in member.name:
        problem = "leaves the folder it is unpacked into"
    else:
        return str(PurePosixPath(*name.parts[1:]))
    raise BundleError(
        f"member {member.name!r} {problem}", where=str(tar), fix="Do not unpack it; get it again."
    )
