"""Limit the values and the depth of a JSON document before it is parsed.

Two bytes of a body encode a value, which takes Python 30 to 200 bytes; a list or an object takes
about eight times the time of a number. The marks outside of strings are counted with arrays, so
that other threads run meanwhile.
"""

from __future__ import annotations

import numpy as np

from ..inputs.batch import Array
from ..trust.verify import DEEPEST
from .refusals import RequestError, TooLargeError

LIST = 8  # values that a list or an object counts as
PIECE = 1 << 18  # bytes of one pass
QUOTE, BACKSLASH, COMMA = b'"\\,'
OPENING, CLOSING = np.frombuffer(b"[{", np.uint8), np.frombuffer(b"]}", np.uint8)


def check_size(data: bytes, most: int) -> None:
    """Check the size of a request's JSON without parsing it; its syntax is not checked.

    most: maximum values; a list or an object counts as LIST values

    Raises TooLargeError above `most`, RequestError for lists and objects nested deeper than
    DEEPEST.
    """
    values, depth, quoted, backslashes = 1, 0, False, 0
    for start in range(0, len(data), PIECE):
        piece = np.frombuffer(data, np.uint8, min(PIECE, len(data) - start), start)
        quotes = piece == QUOTE
        escaped, backslashes = _find_escaped(piece, backslashes)
        quotes[escaped] = False
        inside = (np.cumsum(quotes, dtype=np.int32) + quoted) & 1
        quoted = bool(inside[-1])
        marks = piece[inside == 0]
        steps = np.isin(marks, OPENING).astype(np.int8) - np.isin(marks, CLOSING).astype(np.int8)
        steps = steps[steps != 0]
        path = depth + np.cumsum(steps, dtype=np.int32)
        if len(path):
            depth = int(path[-1])
            if path.max() > DEEPEST:
                raise RequestError(
                    f"the body is not JSON: more than {DEEPEST} nested objects and lists"
                )
        values += int(np.count_nonzero(marks == COMMA))
        values += LIST * int(np.count_nonzero(steps > 0))
        if values > most:
            raise TooLargeError(
                f"the body holds more than {most} values, where a list or an object counts as "
                f"{LIST}; send tensors in binary form (binary_data_size), or start the server with "
                "a larger --max-values"
            )


def _find_escaped(piece: Array, before: int) -> tuple[Array, int]:
    """Find the escaped characters of a piece of a request's JSON.

    before: number of backslashes at the end of the previous piece; only its parity matters

    Returns (positions after an odd number of backslashes, number of backslashes at the end).
    """
    at = np.flatnonzero(piece == BACKSLASH)
    if not len(at):
        return (np.array([0]) if before % 2 else at), 0
    ends = np.flatnonzero(np.diff(at, append=len(piece) + 1) != 1)  # of runs, as indices of `at`
    lengths = np.diff(ends, prepend=-1)
    first = at[0] == 0  # continues the run of the piece before
    lengths[0] += before if first else 0
    after = at[ends] + 1
    odd = after[lengths % 2 == 1]
    last = int(lengths[-1]) if after[-1] == len(piece) else 0
    odd = odd[odd < len(piece)]
    if before % 2 and not first:
        odd = np.append(odd, 0)
    return odd, last
