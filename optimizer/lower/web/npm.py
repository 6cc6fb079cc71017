"""Fetch files of pinned npm packages from a registry or a folder, and check their digest.

npm is not needed, nothing is run, and dependencies are not followed.
"""

from __future__ import annotations

import base64
import hashlib
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from urllib.request import urlopen

from optimizer.foundation.errors import MachineError

TIMEOUT = 60  # seconds without a byte
LARGEST = 256 << 20  # maximum bytes of a package


@dataclass(frozen=True)
class NpmPackage:
    """One version of an npm package that a target for the browser is built with.

    integrity: sha512-<base64>, as in npm's lock files
    files: {name in the package: name of the written file}
    """

    name: str
    version: str
    integrity: str
    files: Mapping[str, str]

    @property
    def file_name(self) -> str:
        return f"{self.name.rpartition('/')[2]}-{self.version}.tgz"

    def address(self, registry: str) -> str:
        return f"{registry.rstrip('/')}/{self.name}/-/{self.file_name}"


def write(package: NpmPackage, source: str, out: Path) -> None:
    """Write the npm package's files into the web target's folder `out`.

    source: https:// address of a registry, or a folder that holds the .tgz
    Raises MachineError for a package that cannot be fetched, or has another digest.
    """
    data = _read(package, source)
    digest = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if digest != package.integrity:
        raise MachineError(
            f"{package.file_name} has the digest {digest[:24]}...",
            where=source,
            accepted=f"{package.integrity[:24]}..., of {package.name} {package.version}",
            fix="This is not the tested package: use another registry or folder.",
        )
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=BytesIO(data), mode="r:gz") as archive:
        for name, written in package.files.items():
            member = archive.extractfile(f"package/{name}")
            assert member is not None  # its digest is the one whose files were listed
            (out / written).write_bytes(member.read())


def _read(package: NpmPackage, source: str) -> bytes:
    """Read the bytes of the web target's npm package, a .tgz from a registry or a folder."""
    remote = source.startswith("https://")
    place = package.address(source) if remote else str(Path(source) / package.file_name)
    try:
        if not remote:
            return Path(place).read_bytes()
        with urlopen(place, timeout=TIMEOUT) as response:
            data: bytes = response.read(LARGEST)
            return data
    except (OSError, HTTPException) as e:
        raise MachineError(
            f"cannot be read ({e})",
            where=place,
            fix=f"Put {package.file_name} into a folder, e.g. by npm pack {package.name}@"
            f"{package.version}, and name the folder: npm: FOLDER.",
        ) from None
