"""A message of gRPC is counted before it is parsed, by its wire format."""

import random

import pytest

from optimizer.harness.server.grpc.size import check_message
from optimizer.harness.server.json_size import LIST
from optimizer.harness.server.refusals import RequestError, TooLargeError
from tests.harness.server.over_grpc import needs_grpc, texts_request

pytestmark = needs_grpc


def test_what_a_client_sends_is_counted_field_by_field() -> None:
    request = texts_request([b"good", b"film"], id="7")
    request.inputs[0].contents.int_contents.extend([1, 2, 3])
    request.outputs.add(name="embedding")
    # model_name, id, inputs {name, datatype, shape, contents {three numbers}}, outputs {name}, raw
    fields = (2 + 1 + 4 + 1 + 2 + 1) * LIST + 3
    check_message(request.SerializeToString(), fields)
    with pytest.raises(TooLargeError):
        check_message(request.SerializeToString(), fields - 1)


@pytest.mark.parametrize("repeated", [b"\x2a\x00", b"\x32\x00", b"\x22\x00", b"\x3a\x00"])
def test_fields_of_two_bytes_each_are_refused_and_not_made(repeated: bytes) -> None:
    with pytest.raises(TooLargeError):
        check_message(repeated * (1 << 20), 1 << 19)


def test_numbers_of_several_bytes_count_once() -> None:
    request = texts_request([])
    size = len(request.SerializeToString())
    request.inputs[0].contents.int64_contents.extend([1, 30_000, -1, 1 << 40, 0])
    data = request.SerializeToString()
    assert len(data) > size + 20
    counted = next(n for n in range(200) if passes(data, n))
    request.inputs[0].contents.int64_contents.append(30_000)
    assert not passes(request.SerializeToString(), counted)
    assert passes(request.SerializeToString(), counted + 1)


def passes(data: bytes, most: int) -> bool:
    try:
        check_message(data, most)
    except TooLargeError:
        return False
    return True


def test_texts_inside_a_tensor_are_counted() -> None:
    texts = b"\x42\x00" * 100_000
    contents = b"\x2a" + _varint(len(texts)) + texts
    with pytest.raises(TooLargeError):
        check_message(b"\x2a" + _varint(len(contents)) + contents, 1 << 19)


def test_what_is_not_a_message_is_refused_or_passes_whatever_bytes_it_has() -> None:
    draw, good = random.Random(0), texts_request([b"good"]).SerializeToString()
    refused = 0
    for _ in range(2000):
        data = bytearray(good if draw.random() < 0.7 else draw.randbytes(40))
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            check_message(bytes(data[: draw.randint(1, len(data))]), 1 << 19)
        except RequestError:
            refused += 1
    assert 200 < refused < 2000


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
