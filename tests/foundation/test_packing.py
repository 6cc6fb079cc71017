from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from optimizer.foundation import packing

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, max_side=7)


@given(hnp.arrays(np.int8, SHAPES, elements=st.integers(-8, 7)))
def test_unpack4_undoes_pack4(codes: np.ndarray) -> None:
    assert np.array_equal(packing.unpack4(packing.pack4(codes), codes.shape), codes)


@given(hnp.arrays(np.uint8, SHAPES, elements=st.integers(0, 15)))
def test_unpack4_unsigned_undoes_pack4_unsigned(codes: np.ndarray) -> None:
    packed = packing.pack4_unsigned(codes)
    assert np.array_equal(packing.unpack4_unsigned(packed, codes.shape), codes)


@given(hnp.arrays(np.int8, hnp.array_shapes(min_dims=2, max_dims=2)))
def test_from_kn_undoes_to_kn(codes: np.ndarray) -> None:
    assert np.array_equal(packing.from_kn(packing.to_kn(codes)), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_to_signed_undoes_to_unsigned_over_every_code(bits: int) -> None:
    codes = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).astype(np.int8)
    unsigned = packing.to_unsigned(codes, bits)
    assert np.array_equal(unsigned, np.arange(2**bits))
    assert np.array_equal(packing.to_signed(unsigned, bits), codes)


def test_the_first_element_is_the_low_nibble() -> None:
    assert packing.pack4(np.array([1, -2, -8, 7, -1], np.int8)).tobytes() == b"\xe1\x78\x0f"
    assert packing.pack4_unsigned(np.array([1, 14, 8])).tobytes() == b"\xe1\x08"


def test_rows_of_odd_length_run_on_into_the_next_byte() -> None:
    codes = np.array([[1, 2, 3], [4, 5, 6]], np.int8)
    assert packing.pack4(codes).tobytes() == b"\x21\x43\x65"


@given(hnp.arrays(np.int8, SHAPES, elements=st.integers(-8, 7)))
def test_onnx_reads_our_int4_as_the_same_numbers(codes: np.ndarray) -> None:
    proto = onnx.TensorProto(data_type=onnx.TensorProto.INT4, dims=codes.shape)
    proto.raw_data = packing.pack4(codes).tobytes()
    read = onnx.numpy_helper.to_array(proto)
    assert read.dtype == ml_dtypes.int4
    assert np.array_equal(read.astype(np.int8), codes)


@given(hnp.arrays(np.uint8, SHAPES, elements=st.integers(0, 15)))
def test_onnx_writes_the_same_bytes_for_uint4(codes: np.ndarray) -> None:
    proto = onnx.numpy_helper.from_array(codes.astype(ml_dtypes.uint4))
    assert proto.raw_data == packing.pack4_unsigned(codes).tobytes()


@pytest.mark.parametrize("code", [-9, 8])
def test_a_code_that_does_not_fit_is_refused(code: int) -> None:
    with pytest.raises(ValueError, match="4 signed bits"):
        packing.pack4(np.array([0, code], np.int8))


def test_an_unsigned_code_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="4 unsigned bits"):
        packing.pack4_unsigned(np.array([16]))
