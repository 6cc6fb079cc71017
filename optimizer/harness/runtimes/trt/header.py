"""The first 64 bytes of a TensorRT-RTX engine, the only part readable without its GPU.

    bytes  0-3   magic, "vtrt"
    bytes 16-23  length of the whole file, little-endian
    bytes 24-27  version of the builder: major, minor, patch, build
    byte  32     GPUs it was built for, one bit per compute capability (CAPABILITIES); bit 0x40
                 is set by a build for the default targets and has no name in the API

Found by building for each target in turn with 1.7.1; other bytes are not interpreted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BundleError

SIZE = 64
MAGIC = b"vtrt"
CAPABILITIES = {0x01: "75", 0x02: "80", 0x04: "86", 0x08: "89", 0x10: "120", 0x20: "121"}


@dataclass(frozen=True)
class Header:
    """version: "1.7.1.116". compute_capabilities: the named ones, ascending."""

    length: int
    version: str
    compute_capabilities: tuple[str, ...]


def read_header(path: Path) -> Header:
    """Parse and check the header of an engine file; nothing is deserialized.

    Raises BundleError when it is no engine, or is not as long as it says it is.
    """
    with path.open("rb") as f:
        data = f.read(SIZE)
    if len(data) < SIZE or data[:4] != MAGIC:
        raise BundleError("not a TensorRT-RTX engine", where=str(path))
    header = Header(
        length=int.from_bytes(data[16:24], "little"),
        version=".".join(map(str, data[24:28])),
        compute_capabilities=tuple(c for bit, c in CAPABILITIES.items() if data[32] & bit),
    )
    size = path.stat().st_size
    if header.length != size:
        raise BundleError(
            f"the engine says it is {header.length} bytes long, the file has {size}",
            where=str(path),
            fix="It was cut short or changed; copy or build it again.",
        )
    return header


def belongs(path: Path, fit: Mapping[str, Any]) -> bool:
    """Whether an engine file is of the version and the GPUs that its entry in the manifest says,
    and as long as it says itself: a right digest may be that of another engine."""
    try:
        header = read_header(path)
    except (OSError, BundleError):
        return False
    entry = fit["runtime_version"], tuple(fit["compute_capabilities"])
    return entry == (header.version, header.compute_capabilities)
