"""The bytes of blocks: literal, and as the gguf package reads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.lower.gguf import blocks
from tests.conftest import heavy_tailed
from tests.lower.states import rounded

SCHEMES = [
    Scheme(8),
    Scheme(8, granularity="tensor"),
    Scheme(8, True, "group", 32),
    Scheme(8, True, "group", 64),
    Scheme(4),
    Scheme(4, True, "group", 32),
    Scheme(4, True, "group", 128),
    Scheme(4, True, "group", 32, full_range=True),
    Scheme(3, True, "group", 32),
    Scheme(4, False, "group", 32),
    Scheme(4, False),
]


def one_row(scheme: Scheme, zero_point: int | None = None) -> QTensor:
    """Integers -8, -7, .. 7 twice, or 0 to 31 in 8 bits; scale 2."""
    values = torch.arange(32) if scheme.bits == 8 else torch.arange(32) % 16 - 8
    zero = None if zero_point is None else torch.tensor([[zero_point]], dtype=torch.int8)
    return QTensor(values[None].to(torch.int8), torch.tensor([[2.0]]), zero, scheme)


def test_the_bytes_of_q8_0() -> None:
    expected = bytes.fromhex("0040") + bytes(range(32))
    assert blocks.pack(one_row(Scheme(8))).tobytes() == expected


def test_the_bytes_of_q4_0_hold_values_j_and_j_plus_16() -> None:
    expected = bytes.fromhex("0040 00112233445566778899aabbccddeeff")
    assert blocks.pack(one_row(Scheme(4))).tobytes() == expected


def test_a_negative_scale_of_q4_0_keeps_its_sign() -> None:
    q = one_row(Scheme(4, full_range=True))
    negative = QTensor(q.integers, -q.scale, None, q.scheme)
    expected = bytes.fromhex("00c0 00112233445566778899aabbccddeeff")
    assert blocks.pack(negative).tobytes() == expected


def test_the_bytes_of_q4_1_hold_the_minimum() -> None:
    expected = bytes.fromhex("0040 00cc 00112233445566778899aabbccddeeff")  # 0xcc00: -16
    assert blocks.pack(one_row(Scheme(4, False), 0)).tobytes() == expected


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_gguf_package_reads_the_values_back(scheme: Scheme) -> None:
    q = rounded(heavy_tailed((64, 256), 1, 0.1), scheme)
    read = dequantize(blocks.pack(q), GGMLQuantizationType[blocks.choose_type(q)])
    assert np.array_equal(read, blocks.compute_values(q).numpy())
    if scheme.symmetric:
        assert torch.equal(blocks.compute_values(q), q.dequantize())
    else:
        moved = (
            (blocks.compute_values(q) - q.dequantize()).abs()
            / q.scale.repeat_interleave(256 // q.scale.shape[1], 1)
        ).max()
        assert 0 < float(moved) <= blocks.measure_minimum_error(q) * (1 + 1e-3) < 15 * 2.0**-11


@pytest.mark.parametrize(
    ("scheme", "columns", "problem"),
    [
        (Scheme(8), 48, "not a multiple of 32"),
        (Scheme(4, True, "group", 16), 64, "groups have 16"),
        (Scheme(8, False), 64, "no place for them"),
    ],
)
def test_what_no_block_holds_is_refused(scheme: Scheme, columns: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        blocks.pack(rounded(heavy_tailed((4, columns), 1, 0.1), scheme))


def test_a_scale_that_fp16_does_not_hold_is_refused() -> None:
    q = QTensor(torch.zeros(1, 32, dtype=torch.int8), torch.tensor([[2.0**-30]]), None, Scheme(8))
    with pytest.raises(ValueError, match="fp16 does not hold"):
        blocks.pack(q)
