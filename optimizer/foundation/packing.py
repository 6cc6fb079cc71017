"""Bit layouts that lowerings write, each with its inverse.

A QTensor has integers (out, in) and scale (out, groups); ONNX multiplies x [.., K] by W [K, N] with
K = in, N = out. Laws (tested): from_kn(to_kn(a)) == a; unpack4(pack4(a)) == a;
unpack4_unsigned(pack4_unsigned(a)) == a; unpack4_rows(pack4_rows(a), columns) == a;
to_signed(to_unsigned(a)) == a; unpack32(pack32(a, bits), bits, columns) == a.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]


def to_kn(integers: Array) -> Array:
    """Transpose integers (out, in) to contiguous [K, N], or scales (out, groups) to [groups, N]."""
    return _transposed(integers)


def from_kn(stored: Array) -> Array:
    """Transpose stored [K, N] back to (out, in), the inverse of to_kn."""
    return _transposed(stored)


def _transposed(array: Array) -> Array:
    plain = np.require(array, requirements=["C", "W"])
    transposed: Array = torch.from_numpy(plain).t().contiguous().numpy()  # numpy: five times longer
    return transposed


def pack4(integers: Array) -> NDArray[np.uint8]:
    """Pack int8 integers in -8..7, any shape, into bytes of ONNX INT4 (TensorProto.raw_data).

    The elements in row-major order, two per byte: element 2i in the low nibble of byte i,
    2i + 1 in the high nibble, two's complement; an odd count ends in a zero nibble.
    """
    flat = integers.reshape(-1).astype(np.int8)
    if flat.size and (flat.min() < -8 or flat.max() > 7):
        raise ValueError(f"integers {flat.min()}..{flat.max()} do not fit 4 signed bits")
    return _pack(flat.view(np.uint8) & np.uint8(0x0F))


def unpack4(packed: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.int8]:
    """Unpack bytes of ONNX INT4 to the integers of a tensor of `shape`, the inverse of pack4."""
    nibbles = _unpack(packed, shape)
    return (nibbles ^ 8).astype(np.int8) - np.int8(8)


def pack4_rows(integers: Array) -> NDArray[np.uint8]:
    """Pack int8 (rows, columns) in -8..7 into (rows, ceil(columns/2)): pack4 of each row, odd
    widths padded with 0."""
    even = np.pad(integers, ((0, 0), (0, 1))) if integers.shape[1] % 2 else integers
    return pack4(even).reshape(len(integers), -1)


def unpack4_rows(packed: NDArray[np.uint8], columns: int) -> NDArray[np.int8]:
    """Unpack 4-bit integers to rows of `columns`, the inverse of pack4_rows."""
    rows, wide = packed.shape
    return unpack4(packed.reshape(-1), (rows, 2 * wide))[:, :columns]


def pack4_unsigned(integers: Array) -> NDArray[np.uint8]:
    """Pack integers in 0..15 into bytes of ONNX UINT4, in the layout of pack4."""
    flat = integers.reshape(-1)
    if flat.size and (flat.min() < 0 or flat.max() > 15):
        raise ValueError(f"integers {flat.min()}..{flat.max()} do not fit 4 unsigned bits")
    return _pack(flat.astype(np.uint8))


def unpack4_unsigned(packed: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Unpack bytes of ONNX UINT4 to a tensor of `shape`, the inverse of pack4_unsigned."""
    return _unpack(packed, shape)


def to_unsigned(integers: Array, bits: int) -> NDArray[np.uint8]:
    """Shift signed integers to start at 0: integer + 2**(bits-1).

    With the zero point shifted alike, (integer - zero_point) is unchanged.
    """
    return (integers.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)


def to_signed(integers: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """Shift unsigned integers back to signed ones, the inverse of to_unsigned."""
    return (integers.astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


def pack32(integers: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack integers in 0..2**bits - 1, (rows, columns), into (rows, ceil(columns * bits / 32)).

    Each row is one stream of bits, lowest first, cut into 32-bit words: integer i takes the bits
    from i * bits, so that one of 3 bits may lie in two words. Missing integers are 0. This is the
    layout of compressed-tensors (pack_quantized) and, on the transposed matrix, of GPTQ.
    """
    if integers.size and int(integers.max()) >> bits:
        raise ValueError(f"integer {integers.max()} does not fit {bits} unsigned bits")
    rows, columns = integers.shape
    groups = -(-columns // 32)
    padded = np.zeros((rows, groups * 32), np.uint8)
    padded[:, :columns] = integers
    lanes = padded.reshape(rows, groups, 32)
    words = np.zeros((rows, groups, bits), np.uint32)
    for lane in range(32):
        word, shift = divmod(lane * bits, 32)
        value = lanes[:, :, lane].astype(np.uint32)
        words[:, :, word] |= value << np.uint32(shift)
        if shift + bits > 32:
            words[:, :, word + 1] |= value >> np.uint32(32 - shift)
    used = -(-columns * bits // 32)
    return np.ascontiguousarray(words.reshape(rows, groups * bits)[:, :used]).view(np.int32)


def unpack32(packed: NDArray[np.int32], bits: int, columns: int) -> NDArray[np.uint8]:
    """Unpack 32-bit words to `columns` integers per row, the inverse of pack32."""
    rows, used = packed.shape
    groups = -(-columns // 32)
    padded = np.zeros((rows, groups * bits), np.uint32)
    padded[:, :used] = np.ascontiguousarray(packed).view(np.uint32)
    words = padded.reshape(rows, groups, bits)
    lanes = np.empty((rows, groups, 32), np.uint8)
    for lane in range(32):
        word, shift = divmod(lane * bits, 32)
        value = words[:, :, word] >> np.uint32(shift)
        if shift + bits > 32:
            value |= words[:, :, word + 1] << np.uint32(32 - shift)
        lanes[:, :, lane] = value & np.uint32((1 << bits) - 1)
    return np.ascontiguousarray(lanes.reshape(rows, groups * 32)[:, :columns])


def _pack(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if nibbles.size % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    return nibbles[0::2] | (nibbles[1::2] << np.uint8(4))


def _unpack(packed: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    pairs = np.stack([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(-1)[: int(np.prod(shape))].reshape(shape)
