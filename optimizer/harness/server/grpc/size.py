"""The size of a ModelInferRequest before it is parsed: how many fields and numbers it holds.

Two bytes of a message are enough for an empty tensor or text, which takes 16 to 200 when it is
parsed, and one for a small number, which takes 8. Messages are walked as their wire format has
them: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import Any

from ..json_size import LIST
from ..refusals import RequestError, TooLargeError

VARINTS = 0  # numbers of 1 to 10 bytes; all but the last byte of each have the high bit
HIGH = bytes(range(128, 256))

# by the number of a field: the fields inside it, or the bytes of each number of packed ones
PARAMETER: dict[int, Any] = {}
CONTENTS = {**dict.fromkeys(range(1, 6), VARINTS), 6: 4, 7: 8}
REQUEST: dict[int, Any] = {4: PARAMETER, 5: {4: PARAMETER, 5: CONTENTS}, 6: {4: PARAMETER}}
VARINT, EIGHT, LENGTH, FOUR = 0, 1, 2, 5


def check_message(data: bytes, most: int) -> None:
    """Raises TooLargeError for more than `most` numbers, where any other field counts as LIST; and
    RequestError for what is not a message."""
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
                    known = inside.get(tag >> 3)
                    if known == VARINTS:
                        values += len(data[at : at + length].translate(None, HIGH))
                    elif isinstance(known, int):
                        values += length // known
                    elif known is not None:
                        waiting.append((at, at + length, known))
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
    """(a number of 64 bits, where it ends). Raises IndexError."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError
