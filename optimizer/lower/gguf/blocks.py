"""Pack quantized rows into the blocks of a GGUF file.

Byte specification
------------------
A row is cut into blocks of 32 values, each with fp16 numbers of its own, little-endian:

    Q8_0   34 bytes   d fp16, then 32 int8 q                     value = q * d
    Q4_0   18 bytes   d fp16, then 16 bytes of nibbles q         value = (q - 8) * d
    Q4_1   20 bytes   d fp16, m fp16, then 16 bytes of nibbles   value = q * d + m

    byte j of the nibbles: value j of the block in the low half, value j + 16 in the high half

A scale of ours that covers several blocks is repeated in each. Q8_0 and Q4_0 hold our values
exactly where fp16 holds the scale. Q4_1 holds m = -(zero_point + 8) * scale rounded to fp16.

Source: ggml/src/ggml-common.h of llama.cpp (block_q8_0, block_q4_0, block_q4_1).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimizer.foundation.qtensor import QTensor, is_exact_in

BLOCK = 32
TYPES = ("Q8_0", "Q4_0", "Q4_1")
Bytes = NDArray[np.uint8]


def choose_type(q: QTensor) -> str:
    """Choose the GGUF block type of a quantized weight. Raises ValueError for 8 bits with zero
    points, a row or group that is not whole blocks, and a scale that fp16 does not hold."""
    columns = q.integers.shape[1]
    if columns % BLOCK:
        raise ValueError(f"its rows have {columns} values, which is not a multiple of {BLOCK}")
    if q.scheme.group_size is not None and q.scheme.group_size % BLOCK:
        raise ValueError(f"its groups have {q.scheme.group_size} values, not a multiple of {BLOCK}")
    if not is_exact_in(q.scale, torch.float16):
        raise ValueError("it has a scale that fp16 does not hold")
    if q.scheme.bits == 8:
        if not q.scheme.symmetric:
            raise ValueError("it has 8 bits and zero points, and Q8_0 has no place for them")
        return "Q8_0"
    return "Q4_0" if q.scheme.symmetric else "Q4_1"


def pack(q: QTensor) -> Bytes:
    """Pack a quantized weight (out, in) into GGUF's blocks, uint8 (out, in / 32 * bytes of a
    block).

    Raises ValueError as choose_type.
    """
    kind = choose_type(q)
    rows, columns = q.integers.shape
    codes = q.integers.numpy().reshape(rows, columns // BLOCK, BLOCK)
    parts = [_fp16(expand_to_blocks(q.scale, q))]
    if kind == "Q4_1":
        parts.append(_fp16(expand_to_blocks(compute_minimum(q), q)))
    parts.append(codes.view(np.uint8) if kind == "Q8_0" else _nibbles(codes))
    return np.concatenate(parts, -1).reshape(rows, -1)


def compute_minimum(q: QTensor) -> Tensor:
    """Compute m of GGUF's Q4_1, the value of integer 0: float32 in the scale's shape, unrounded."""
    assert q.zero_point is not None
    return -(q.zero_point.float() + 8) * q.scale


def measure_minimum_error(q: QTensor) -> float:
    """Measure the maximum error of Q4_1's m when rounded to fp16, in steps of its scale; 0.0 for
    symmetric weights, which have no m."""
    if q.zero_point is None:
        return 0.0
    exact = compute_minimum(q)
    return float(((exact.half().float() - exact) / q.scale).abs().max())


def compute_values(q: QTensor) -> Tensor:
    """Compute a weight's values in the GGUF file, float32 (out, in): the state's, with m in
    fp16."""
    if q.zero_point is None:
        return q.dequantize()
    rows, columns = q.integers.shape
    scale, low = (
        expand_to_blocks(t, q).repeat_interleave(BLOCK, 1)
        for t in (q.scale, compute_minimum(q).half().float())
    )
    return ((q.integers.float() + 8) * scale + low).reshape(rows, columns)


def expand_to_blocks(per_group: Tensor, q: QTensor) -> Tensor:
    """Repeat numbers of groups (out, groups), or of a tensor (1, 1), to GGUF's blocks (out, blocks
    of a row)."""
    rows, columns = q.integers.shape
    blocks = columns // BLOCK
    return per_group.expand(rows, -1).repeat_interleave(blocks // per_group.shape[1], 1)


def _fp16(per_block: Tensor) -> Bytes:
    return per_block.numpy().astype("<f2").view(np.uint8).reshape(*per_block.shape, 2)


def _nibbles(codes: NDArray[np.int8]) -> Bytes:
    unsigned: Bytes = (codes + 8).astype(np.uint8)
    low, high = unsigned[..., : BLOCK // 2], unsigned[..., BLOCK // 2 :]
    return np.asarray(low | (high << 4), np.uint8)
