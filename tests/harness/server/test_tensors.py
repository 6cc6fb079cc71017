"""Bodies of the Open Inference Protocol, whose bytes are written here by hand."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.harness.server.refusals import RequestError
from optimizer.harness.server.tensors import DTYPES, from_raw, read, to_raw, write


def body(**tensor: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "x", **tensor}]}).encode()


def test_data_is_row_major_nested_or_flat() -> None:
    for data in ([[1, 2, 3], [4, 5, 6]], [1, 2, 3, 4, 5, 6]):
        array = read(body(shape=[2, 3], datatype="INT64", data=data), None).inputs["x"]
        assert array.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert array.dtype == np.int64


def test_raw_tensors_follow_the_document_in_the_order_of_the_inputs() -> None:
    texts = b"".join(struct.pack("<I", len(t)) + t for t in (b"\xc3\xa4", b""))
    document = {
        "id": "7",
        "parameters": {"binary_data_output": True},
        "inputs": [
            {"name": "t", "shape": [2], "datatype": "BYTES"},
            {"name": "y", "shape": [1], "datatype": "INT8", "data": [-3]},
            {"name": "n", "shape": [1, 2], "datatype": "INT16"},
        ],
    }
    sizes = {"t": len(texts), "n": 4}
    for tensor in document["inputs"]:
        if tensor["name"] in sizes:
            tensor["parameters"] = {"binary_data_size": sizes[tensor["name"]]}
    head = json.dumps(document).encode()
    request = read(head + texts + b"\x01\x00\xff\xff", len(head))
    assert request.inputs["t"].tolist() == ["ä".encode(), b""]
    assert request.inputs["n"].tolist() == [[1, -1]]
    assert request.inputs["y"].tolist() == [-3]
    assert (request.id, request.binary, request.outputs) == ("7", True, None)


@pytest.mark.parametrize(
    ("kind", "data"),
    [("FP32", b"\x00\x00\x80\x3f"), ("INT16", b"\x01\x02"), ("BYTES", b"\x02\x00\x00\x00ab")],
)
def test_a_tensor_has_the_bytes_of_the_specification(kind: str, data: bytes) -> None:
    array = from_raw(data, kind, (1,), "x")
    assert array.tolist() == {"FP32": [1.0], "INT16": [513], "BYTES": [b"ab"]}[kind]
    assert to_raw(array) == data


@given(st.sampled_from(sorted(DTYPES)), st.integers(0, 3), st.integers(1, 3), st.randoms())
def test_an_answer_in_bytes_is_read_again(kind: str, rows: int, width: int, chance: Any) -> None:
    if kind == "BYTES":
        array = np.empty(rows * width, object)
        array[:] = [chance.randbytes(chance.randrange(5)) for _ in range(rows * width)]
        array = array.reshape(rows, width)
    else:
        array = (np.arange(rows * width).reshape(rows, width) % 2).astype(DTYPES[kind])
    answer, length = write({"model_name": "m"}, [("x", array, True)])
    document = json.loads(answer[:length])
    assert document["outputs"][0]["shape"] == [rows, width]
    again = from_raw(answer[length:], kind, (rows, width), "x")
    assert again.tolist() == array.tolist()


def test_floats_in_json_are_the_same_numbers() -> None:
    array = np.array([0.1, 1 / 3, 1e-42], np.float32)
    answer, length = write({}, [("x", array, False)])
    data = json.loads(answer)["outputs"][0]["data"]
    assert length is None
    assert np.array_equal(np.array(data, np.float32), array)


INPUT = {"shape": [1], "datatype": "INT64", "data": [1]}
BROKEN = {
    "not JSON": (b"{", "not JSON"),
    "NaN": (b'{"inputs": [NaN]}', "NaN is not JSON"),
    "not UTF-8": (b'{"inputs": "\xff"}', "byte 13 of the body is not UTF-8"),
    "a list": (b"[]", "not a JSON object"),
    "half a character": (b'{"id": "\\ud800"}', "lone surrogate"),
    "no inputs": (b"{}", "'inputs' of request is not a list"),
    "deep": (b'{"inputs":' + b"[" * 100_000, "nested objects and lists"),
    "no name": (b'{"inputs": [{}]}', "the name of inputs[0]"),
    "no datatype": (body(shape=[1], data=[1]), "input 'x' has datatype None"),
    "another": (body(**INPUT | {"datatype": "INT65"}), "has datatype of type str"),
    "no shape": (body(datatype="INT64", data=[1]), "not a list of at most 8 sizes"),
    "negative": (body(**INPUT | {"shape": [-1]}), "has size -1 in its shape"),
    "many": (body(**INPUT | {"shape": [1 << 40]}), "has size 1099511627776 in its shape"),
    "fewer": (body(**INPUT | {"shape": [2]}), "has 1 elements, and its shape [2] has 2"),
    "a string": (body(**INPUT | {"data": ["secret"]}), "elements of another type"),
    "a float": (body(**INPUT | {"data": [1.5]}), "elements of another type"),
    "a bool": (body(**INPUT | {"data": [True]}), "elements of another type"),
    "too large": (body(**INPUT | {"data": [1 << 70]}), "INT64 does not hold"),
    "uneven": (body(**INPUT | {"shape": [2], "data": [[1], 2]}), "mixes lists and elements"),
    "no bytes": (body(**INPUT | {"datatype": "BYTES"}), "elements that are not strings"),
    "half": (body(**INPUT | {"datatype": "FP16"}), "only comes binary"),
    "beyond": (
        body(shape=[1], datatype="INT8", parameters={"binary_data_size": 1}),
        "binary_data_size 1, and 0 bytes are left",
    ),
    "id": (b'{"id": 7, "inputs": []}', "id is not a string"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_body_that_is_not_as_it_says_is_refused_and_not_repeated(name: str) -> None:
    data, message = BROKEN[name]
    with pytest.raises(RequestError) as e:
        read(data, None)
    assert message in e.value.message
    assert "secret" not in e.value.message


@pytest.mark.parametrize(
    ("kind", "shape", "data"),
    [
        ("INT64", (1,), b"1234567"),
        ("BOOL", (1,), b"\x02"),
        ("BYTES", (1,), b"\xff\xff\xff\xffa"),
        ("BYTES", (2,), b"\x01\x00\x00\x00a"),
    ],
)
def test_bytes_that_are_no_tensor_are_refused(kind: str, shape: tuple[int], data: bytes) -> None:
    with pytest.raises(RequestError, match="input 'x'"):
        from_raw(data, kind, shape, "input 'x'")


def test_what_follows_the_last_tensor_is_refused() -> None:
    head = body(**INPUT)
    with pytest.raises(RequestError, match="3 bytes follow"):
        read(head + b"abc", len(head))
    with pytest.raises(RequestError, match="Inference-Header-Content-Length"):
        read(head, len(head) + 1)
