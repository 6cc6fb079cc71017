"""Read the external data files and the metadata of an ONNX file from its bytes.

A model may name any path as external data, and the runtime would map it. So the names are read from
the protobuf wire format before a bundle's model is opened. Only messages that can hold a tensor are
parsed; others are skipped by their length.
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto (field numbers)
https://protobuf.dev/programming-guides/encoding (wire format)
"""

from __future__ import annotations

import mmap
from pathlib import Path

from ...errors import BundleError

# message -> {field number: the message in it}
HOLDS = {
    "model": {7: "graph", 14: "property", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
PAIRS = ("entry", "property")  # key-value messages: external data of a tensor, metadata
KEY, VALUE = 1, 2
DEEPEST = (
    200  # maximum nesting (a graph in a node in a graph is three); far deeper ONNX Runtime crashes
)
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def list_external_files(model: Path) -> set[str]:
    """Return every location of external data that an ONNX file names.

    Raises BundleError if the file is not a protobuf message.
    """
    return {value for kind, key, value in _pairs(model) if (kind, key) == ("entry", "location")}


def read_metadata(model: Path) -> dict[str, str]:
    """Return the metadata_props of an ONNX file {key: value}.

    Raises BundleError if the file is not a protobuf message.
    """
    return {key: value for kind, key, value in _pairs(model) if kind == "property"}


def _pairs(model: Path) -> list[tuple[str, str, str]]:
    """Return (kind, key, value) of every key-value message of an ONNX file, in file order."""
    pairs: list[tuple[str, str, str]] = []
    try:
        with model.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _walk(data, 0, len(data), "model", pairs)
    except (IndexError, ValueError) as e:
        raise BundleError(f"it is not an ONNX model ({e})", where=str(model)) from None
    return pairs


def check_inside(model: Path, folder: Path, listed: set[str]) -> None:
    """Raise BundleError if an ONNX file names external data outside the folder or not in `listed`.

    listed: file names of the manifest, relative to `folder`
    """
    for location in sorted(list_external_files(model)):
        try:
            target = (model.parent / location).resolve()
        except (OSError, ValueError, RuntimeError) as e:
            raise BundleError(
                f"the model keeps weights in {location!r:.200}, which is not a file name ({e})",
                where=str(model),
            ) from None
        inside = target.is_relative_to(folder.resolve())
        if not inside or str(target.relative_to(folder.resolve())) not in listed:
            raise BundleError(
                f"the model keeps weights in {location!r}, which is "
                f"{'not in the manifest' if inside else 'outside the bundle'}",
                where=str(model),
                fix="Do not run it: the bundle may have been tampered with. Get it again.",
            )


def _walk(
    data: mmap.mmap,
    at: int,
    end: int,
    message: str,
    pairs: list[tuple[str, str, str]],
    depth: int = 0,
) -> None:
    """Parse an ONNX file: append (kind, key, value) of each key-value message between two offsets
    to `pairs`.

    message: type of the protobuf message that these bytes hold
    depth: number of enclosing messages
    """
    entry: dict[int, bytes] = {}
    while at < end:
        tag, at = _varint(data, at)
        field, wire = tag >> 3, tag & 7
        if wire == VARINT:
            _, at = _varint(data, at)
        elif wire == FIXED64:
            at += 8
        elif wire == FIXED32:
            at += 4
        elif wire == BYTES:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError("a field is longer than its message")
            if message in PAIRS:
                entry[field] = data[at : at + size]
            elif field in HOLDS[message]:
                if depth == DEEPEST:
                    raise ValueError(f"more than {DEEPEST} nested messages")
                _walk(data, at, at + size, HOLDS[message][field], pairs, depth + 1)
            at += size
        else:
            raise ValueError(f"wire type {wire}")
    if message in PAIRS:
        pairs.append((message, entry.get(KEY, b"").decode(), entry.get(VALUE, b"").decode()))


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """Read an integer of variable length as protobuf encodes it; return (value, offset behind
    it)."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")
