"""Write a safetensors file without holding its tensors in memory together.

safetensors' own writer takes a dict of live tensors. Here each tensor is appended to a spool
beside the target as it comes, and the file is then put together: header, then the spooled
bytes in lexicographic order of the names. The bytes therefore do not depend on the order of
arrival. Format: 8 bytes little-endian header length, JSON header padded with spaces to a
multiple of 8, data (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
CHUNK = 1 << 24


def write(entries: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write `entries` to `path`. Raises ValueError for a repeated name.

    Disk needed while it runs: twice the size of the tensors. Memory: one tensor.
    """
    spool = path.with_name(path.name + ".spool")
    placed: dict[str, tuple[str, list[int], int, int]] = {}
    with spool.open("wb") as f:
        for name, tensor in entries:
            if name in placed:
                raise ValueError(f"tensor {name!r} given twice")
            begin = f.tell()
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            f.write(raw.data)
            placed[name] = (DTYPE_NAMES[tensor.dtype], list(tensor.shape), begin, f.tell())
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name in sorted(placed):
        dtype, shape, begin, end = placed[name]
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + end - begin],
        }
        offset += end - begin
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as out, spool.open("rb") as f:
        out.write(len(head).to_bytes(8, "little") + head)
        for name in sorted(placed):
            _, _, begin, end = placed[name]
            f.seek(begin)
            while begin < end:
                piece = f.read(min(CHUNK, end - begin))
                out.write(piece)
                begin += len(piece)
    spool.unlink()
