"""Write a safetensors file without holding its tensors in memory together.

safetensors' own writer takes a dict of live tensors. Here each tensor is appended to a spool file
beside the target as it arrives; then the header and the spooled bytes are written. Format: 8 bytes
little-endian header length, JSON header padded with spaces to a multiple of 8, data (https://huggingface.co/docs/safetensors).

Laws: the bytes do not depend on the order of arrival, and equal those of safetensors' own writer:
wider element types first, then by name, so that every tensor is aligned to its element size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

# In the order of safetensors' Dtype enum, which is what its writer sorts by, last first.
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
RANK = {name: rank for rank, name in enumerate(DTYPE_NAMES.values())}
CHUNK = 1 << 24


@dataclass(frozen=True)
class _Spooled:
    dtype: str
    shape: list[int]
    begin: int
    size: int


def write(
    entries: Iterable[tuple[str, Tensor]], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write `entries` to `path`. Raises ValueError for a repeated name or an unsupported dtype.

    metadata: "__metadata__" of the header, which some readers need ({"format": "pt"})

    Needs twice the size of the tensors on disk while it runs, and one tensor in memory. Removes its
    files when it fails.
    """
    spool = path.with_name(path.name + ".spool")
    try:
        placed = _spool(entries, spool)
        order = sorted(placed, key=lambda name: (-RANK[placed[name].dtype], name))
        with path.open("wb") as out, spool.open("rb") as f:
            out.write(_header(placed, order, metadata))
            for name in order:
                f.seek(placed[name].begin)
                left = placed[name].size
                while left:
                    piece = f.read(min(CHUNK, left))
                    out.write(piece)
                    left -= len(piece)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        spool.unlink(missing_ok=True)


def write_known(
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the same bytes as `write` without a spool file, because names, dtypes and shapes are
    known.

    specs: {name: (dtype, shape)}
    read: function that returns a tensor; called once for each name, in the file's order
    metadata: "__metadata__" of the header; None: no such entry

    Needs the size of the tensors on disk. Raises ValueError when a tensor differs from its spec.
    """
    unwritable = [f"{n!r} {d}" for n, (d, _) in specs.items() if d not in DTYPE_NAMES]
    if unwritable:
        raise ValueError(f"tensor {unwritable[0]}: this dtype is not supported")
    placed = {
        name: _Spooled(DTYPE_NAMES[dtype], list(shape), 0, prod(shape) * dtype.itemsize)
        for name, (dtype, shape) in specs.items()
    }
    order = sorted(placed, key=lambda name: (-RANK[placed[name].dtype], name))
    try:
        with path.open("wb") as out:
            out.write(_header(placed, order, metadata))
            for name in order:
                tensor = read(name)
                if (tensor.dtype, tuple(tensor.shape)) != specs[name]:
                    raise ValueError(f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}")
                out.write(_raw(tensor))
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _raw(tensor: Tensor) -> memoryview:
    contiguous = tensor.detach().cpu().contiguous()
    flat = contiguous.as_strided((contiguous.numel(),), (1,))  # an axis of 1 has any stride
    return flat.view(torch.uint8).numpy().data


def _spool(entries: Iterable[tuple[str, Tensor]], spool: Path) -> dict[str, _Spooled]:
    placed: dict[str, _Spooled] = {}
    with spool.open("wb") as f:
        for name, tensor in entries:
            if name in placed:
                raise ValueError(f"tensor {name!r} given twice")
            if tensor.dtype not in DTYPE_NAMES:
                raise ValueError(f"tensor {name!r}: dtype {tensor.dtype} is not supported")
            begin = f.tell()
            f.write(_raw(tensor))
            dtype = DTYPE_NAMES[tensor.dtype]
            placed[name] = _Spooled(dtype, list(tensor.shape), begin, f.tell() - begin)
    return placed


def _header(
    placed: dict[str, _Spooled], order: list[str], metadata: Mapping[str, str] | None
) -> bytes:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        entry = placed[name]
        header[name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [offset, offset + entry.size],
        }
        offset += entry.size
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head
