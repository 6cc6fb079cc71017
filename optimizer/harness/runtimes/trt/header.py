"""Read the header of a TensorRT-RTX engine, the only part that is readable without its GPU.

    bytes  0-3   magic, "vtrt"
    bytes 16-23  length of the whole file, little-endian
    bytes 24-27  version of the builder: major, minor, patch, build
    byte  32     target GPUs, one bit per compute capability (CAPABILITIES); bit 0x40 is set by a
                 build for the default targets and has no name in the API

Found by building for each target with 1.7.1; other bytes are not interpreted.
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
class EngineHeader:
    """Header of a TensorRT engine's file.

    length: bytes of the file.
    version: version of the builder, e.g. "1.7.1.116".
    compute_capabilities: target GPUs in ascending order.
    """

    length: int
    version: str
    compute_capabilities: tuple[str, ...]


def read_header(path: Path) -> EngineHeader:
    """Parse and check the header of a TensorRT engine file, without deserializing the engine.

    Raises BundleError if the file is not an engine, or has another length than the header states.
    """
    with path.open("rb") as f:
        data = f.read(SIZE)
    if len(data) < SIZE or data[:4] != MAGIC:
        raise BundleError("it is not a TensorRT-RTX engine", where=str(path))
    header = EngineHeader(
        length=int.from_bytes(data[16:24], "little"),
        version=".".join(map(str, data[24:28])),
        compute_capabilities=tuple(c for bit, c in CAPABILITIES.items() if data[32] & bit),
    )
    size = path.stat().st_size
    if header.length != size:
        raise BundleError(
            f"the header states {header.length} bytes, the file has {size}",
            where=str(path),
            fix="The file was truncated or changed; copy or build it again.",
        )
    return header


def fits_entry(path: Path, fit: Mapping[str, Any]) -> bool:
    """Return True if a TensorRT engine file has the version and GPUs of its manifest entry.

    A correct digest alone may belong to another engine.
    fit: `fit` of the manifest entry.
    """
    try:
        header = read_header(path)
    except (OSError, BundleError):
        return False
    entry = fit["runtime_version"], tuple(fit["compute_capabilities"])
    return entry == (header.version, header.compute_capabilities)
