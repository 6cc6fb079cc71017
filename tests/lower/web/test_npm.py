"""Files out of npm packages, from a folder: what arrives is what was pinned, or nothing."""

from __future__ import annotations

import base64
import hashlib
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from optimizer.foundation.errors import MachineError
from optimizer.lower.web import npm
from optimizer.lower.web.build import FOLDERS
from optimizer.lower.web.npm import NpmPackage


def packed(folder: Path, text: bytes = b"export {}") -> NpmPackage:
    """A package in a folder, as npm packs one."""
    with tarfile.open(folder / "thing-1.0.0.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("package/dist/thing.mjs")
        member.size = len(text)
        archive.addfile(member, BytesIO(text))
    digest = hashlib.sha512((folder / "thing-1.0.0.tgz").read_bytes()).digest()
    integrity = "sha512-" + base64.b64encode(digest).decode()
    return NpmPackage("@some/thing", "1.0.0", integrity, {"dist/thing.mjs": "thing.mjs"})


def test_the_files_named_are_written(tmp_path: Path) -> None:
    npm.write(packed(tmp_path), str(tmp_path), tmp_path / "out")
    assert (tmp_path / "out" / "thing.mjs").read_bytes() == b"export {}"


def test_another_digest_is_refused_and_nothing_written(tmp_path: Path) -> None:
    pinned = packed(tmp_path)
    packed(tmp_path, b"export const other = 1")
    with pytest.raises(MachineError, match=r"thing-1\.0\.0\.tgz has the digest"):
        npm.write(pinned, str(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_package_that_is_not_there_is_named_with_how_to_get_it(tmp_path: Path) -> None:
    pinned = packed(tmp_path)
    with pytest.raises(MachineError, match=r"npm pack @some/thing@1\.0\.0"):
        npm.write(pinned, str(tmp_path / "elsewhere"), tmp_path / "out")


def test_an_address_is_the_registry_s_for_a_scope_too() -> None:
    addresses = [p.address("https://registry.npmjs.org/") for p in FOLDERS.values()]
    assert addresses == [
        "https://registry.npmjs.org/onnxruntime-web/-/onnxruntime-web-1.30.0.tgz",
        "https://registry.npmjs.org/@huggingface/tokenizers/-/tokenizers-0.2.0.tgz",
    ]
