"""Largest numbers that the commands accept. Beyond them a machine runs out of memory or a library
crashes; a message that names the option is better."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable

from .errors import InputError

THREADS = 1024  # threads per pool; ONNX Runtime starts them at once
BATCH = 4096  # rows per batch
SEQUENCE = 1 << 20  # tokens per row
TOKENS = 1 << 20  # tokens per batch: 4 GiB for one activation of width 1,024
ITERATIONS = 100_000  # timed rounds
NEW_TOKENS = 1 << 20
TEXT = 1 << 20  # characters per text
LINE = 4 << 20  # bytes per line of input
PORT = 65_535
SLOTS = 64  # texts that a server generates at once
DELAY_MS = 60_000  # milliseconds that a server waits for more rows of a batch
WAIT_LEAST, WAIT = 1e-9, 86_400.0  # limits of the seconds that a request may wait
GUESSES = (0, 1, 3, 7, 15)  # accepted values of --prompt-lookup: guessed tokens per step
CONFIDENCE = 0.95  # of the intervals of percentiles
STOPS = 64  # stop strings per request
STOP = 1000  # characters per stop string


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return an argparse type for an option of the harness's commands: a whole number from `low` to
    `high`."""

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
    """Return the fewest timed samples that bound a percentile on both sides.

    All of n samples lie below the percentile with probability (percent / 100)^n, and above it
    with (1 - percent / 100)^n (bundle/bench.percentile_interval).
    """
    likelier = max(percent, 100 - percent) / 100
    return math.ceil(math.log((1 - confidence) / 2) / math.log(likelier))


def length_bounds(longest: int) -> tuple[int, ...]:
    """Return the upper bounds of a server's histogram of input lengths: four per doubling, and
    `longest`."""
    steps = (quarter << octave for octave in range(20) for quarter in (4, 5, 6, 7))
    return (*itertools.takewhile(lambda bound: bound < longest, steps), longest)


def check_grid(batch: int, sequence: int) -> None:
    """Check the shapes that `bench` shall time: raise InputError for more than BATCH rows, SEQUENCE
    tokens per row, or TOKENS in all."""
    for option, value, most in (("--batch", batch, BATCH), ("--sequence", sequence, SEQUENCE)):
        if not 1 <= value <= most:
            raise InputError(f"{value:,} was given", where=option, accepted=f"1 to {most:,}")
    if batch * sequence > TOKENS:
        raise InputError(
            f"{batch:,} rows of {sequence:,} tokens",
            where="--batch, --sequence",
            accepted=f"up to {TOKENS:,} tokens in a batch",
        )
