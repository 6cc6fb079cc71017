"""Limit the fields and numbers of a ModelInferRequest before it is parsed.

Two bytes of a message encode an empty tensor or text, which takes 16 to 200 bytes when parsed, and
one byte a small number, which takes 8. `check_message` walks the wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import Any

from ..json_size import LIST
from ..refusals import RequestError, TooLargeError

VARINTS = 0  # numbers of 1 to 10 bytes; all but the last byte of each have the high bit
HIGH = bytes(range(128, 256))

# number of a field: its inner fields, or the bytes of each of its packed numbers
PARAMETER: dict[int, Any] = {}
CONTENTS = {**dict.fromkeys(range(1, 6), VARINTS), 6: 4, 7: 8}
REQUEST: dict[int, Any] = {4: PARAMETER, 5: {4: PARAMETER, 5: CONTENTS}, 6: {4: PARAMETER}}
VARINT, EIGHT, LENGTH, FOUR = 0, 1, 2, 5


def check_message(data: bytes, most: int) -> None:
    """Check the size of an encoded ModelInferRequest without parsing it.

    most: maximum numbers; each field counts as LIST numbers, besides the numbers in it

    Raises TooLargeError above `most`, RequestError for bytes that are not a message.
    """
    values, waiting = 0, [(0, len(data), REQUEST)]
    try:
        while waiting:
            at, end, inside = waiting.pop()
            while at < end:
                tag, at = _varint(data, at)
                values += LIST
                if tag & 7 == LENGTH:
                    length, at = _varint(data, at)
                    if length > end - at:
                        raise IndexError
                    field = inside.get(tag >> 3)
                    if field == VARINTS:
                        values += len(data[at : at + length].translate(None, HIGH))
                    elif isinstance(field, int):
                        values += length // field
                    elif field is not None:
                        waiting.append((at, at + length, field))
                    at += length
                elif tag & 7 == VARINT:
                    at = _varint(data, at)[1]
                else:
                    at += {EIGHT: 8, FOUR: 4}[tag & 7]
                if values > most:
                    raise TooLargeError(
                        f"the message holds more than {most} numbers, where any other field counts "
                        f"as {LIST}; send tensors in raw_input_contents, or start the server with "
                        "a larger --max-values"
                    )
    except (IndexError, KeyError):
        raise RequestError("the body of the call is not a message of this method") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a varint of a gRPC message at `at`; return (number, position after it). Raises
    IndexError if malformed."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError
