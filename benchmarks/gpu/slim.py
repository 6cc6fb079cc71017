"""Zero the machine code of other GPUs in a CUDA library, so that it packs to a fraction.

A library of CUDA holds "fat binaries": a header, then an entry for each compute capability with
machine code (ELF) or PTX. Entries that are not kept become zeros in place, so that no offset
changes, and the library runs unchanged on the capabilities that are kept.

    header  u32 0xBA55ED50, u16 version, u16 size of the header (16), u64 size of the entries
    entry   u16 kind (1 PTX, 2 ELF), u16, u32 size of its header, u64 size of its payload,
            u32 compute capability at byte 28 (90 for 9.0)
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER, FIRST = 16, 40  # bytes of a header, and of the shortest header of an entry
ELF, KINDS = 2, (1, 2, 8, 16, 32, 64)
CAPABILITY = 28


def slim(library: bytearray, keep: Collection[int]) -> Counter[int]:
    """Zero entries other than machine code for `keep`, in place. Returns {capability: bytes of its
    machine code that were kept}.

    keep: compute capabilities, such as 90
    """
    kept: Counter[int] = Counter()
    at = library.find(MAGIC)
    while at >= 0:
        end = _end(library, at)
        if end is None:  # the four bytes by chance
            at = library.find(MAGIC, at + len(MAGIC))
            continue
        _slim_entries(library, at + HEADER, end, keep, kept)
        at = library.find(MAGIC, end)
    return kept


def _end(library: bytearray, at: int) -> int | None:
    """End of the fat binary whose magic number is at `at`; None where there is none."""
    if at + HEADER > len(library):
        return None
    _, _, header, size = struct.unpack_from("<IHHQ", library, at)
    end = at + header + size
    return int(end) if header == HEADER and size > 0 and end <= len(library) else None


def _slim_entries(
    library: bytearray, at: int, end: int, keep: Collection[int], kept: Counter[int]
) -> None:
    while at + FIRST <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        if kind not in KINDS or header < FIRST or header + size > end - at:
            return
        (capability,) = struct.unpack_from("<I", library, at + CAPABILITY)
        if kind == ELF and capability in keep:
            kept[capability] += size
        else:
            library[at + header : at + header + size] = bytes(size)
        at += header + size
