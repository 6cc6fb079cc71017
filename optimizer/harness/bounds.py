"""The largest numbers that the commands take: beyond them a machine runs out of memory or a library
crashes, and a message that names the option is wanted instead."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from .errors import InputError

THREADS = 1024  # of one pool; ONNX Runtime starts them at once
BATCH = 4096  # inputs that run together
SEQUENCE = 1 << 20  # tokens of a row
TOKENS = 1 << 20  # of a batch: an activation of width 1,024 takes 4 GiB then
ITERATIONS = 100_000  # rounds that are timed, whose times are kept
NEW_TOKENS = 1 << 20
TEXT = 1 << 20  # characters of one text
LINE = 4 << 20  # bytes of one line
PORT = 65_535
SLOTS = 64  # texts that a server continues at once
DELAY_MS = 60_000  # that a server waits for more rows of a batch
WAIT_LEAST, WAIT = 1e-9, 86_400.0  # seconds that a request may wait in a server
GUESSES = (0, 1, 3, 7, 15)  # tokens of a text that are guessed at once, at most
CONFIDENCE = 0.95  # of the intervals of percentiles
STOPS = 64  # stop strings of a request, each of
STOP = 1000  # characters at most


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    def parsed(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} was given. Accepted: a whole number from {low:,} to {high:,}"
            )
        return number

    return parsed


def fewest(percent: float, confidence: float = CONFIDENCE) -> int:
    """Fewest samples that bound a percentile on both sides (bundle/bench.percentile_interval).

    The largest of n lies below it with probability (percent / 100)^n, the smallest above it
    likewise.
    """
    likelier = max(percent, 100 - percent) / 100
    return math.ceil(math.log((1 - confidence) / 2) / math.log(likelier))


def check_grid(batch: int, sequence: int) -> None:
    """Raises InputError for a batch that no machine holds."""
    for option, value, most in (("--batch", batch, BATCH), ("--sequence", sequence, SEQUENCE)):
        if not 1 <= value <= most:
            raise InputError(f"{value:,} was given", where=option, accepted=f"1 to {most:,}")
    if batch * sequence > TOKENS:
        raise InputError(
            f"{batch:,} rows of {sequence:,} tokens were asked for",
            where="--batch, --sequence",
            accepted=f"up to {TOKENS:,} tokens in a batch",
        )
