"""Draw the instants at which requests are due, in seconds from the start, before the first is sent.

    poisson   independent requests: exponential gaps
    bursts    several requests at the same instant, in independent bursts
    recorded  gaps of a recording, repeated, stretched to the rate

Each gives rate * seconds requests on average over a long time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from optimizer.foundation.errors import DataError

MOST = 1_000_000  # requests in one run


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Draw the instants of a load test's independent requests before `seconds` (Poisson arrivals).
    rate: mean requests per second."""
    return list(_until(seconds, _gaps(rate, random.Random(seed))))


def bursts(rate: float, seconds: float, seed: int, size: int) -> list[float]:
    """Draw the instants of a load test's bursts of `size` requests before `seconds`. rate: mean
    requests per second."""
    starts = _until(seconds, _gaps(rate / size, random.Random(seed)))
    return [start for start in starts for _ in range(size)]


def recorded(instants: Sequence[float], rate: float, seconds: float) -> list[float]:
    """Repeat, for a load test, recorded instants of requests until `seconds`: gaps of `instants`,
    repeated, scaled to mean 1 / rate."""
    whole = instants[-1] - instants[0]
    stretch = (len(instants) - 1) / (rate * whole)
    gaps = [(b - a) * stretch for a, b in itertools.pairwise(instants)]
    return list(_until(seconds, (gap for _ in iter(int, 1) for gap in gaps)))


def read(file: Path) -> list[float]:
    """Return the ascending instants of a recording of requests, to be repeated by a load test: a
    file with one number of seconds per line.

    Raises DataError for a file that cannot be read, a line without a number, and fewer than two
    distinct instants.
    """
    try:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as e:
        raise DataError(f"cannot be read ({e})", where=str(file)) from None
    instants = []
    for number, line in enumerate(lines, 1):
        try:
            instants.append(float(line))
        except ValueError:
            instants.append(float("nan"))
        if not abs(instants[-1]) < float("inf"):
            raise DataError(
                f"{line.strip()[:40]!r}", where=f"{file}:{number}", accepted="a number of seconds"
            )
    instants.sort()
    if len(instants) < 2 or instants[0] == instants[-1]:
        raise DataError(
            "fewer than two distinct instants",
            where=str(file),
            accepted="two instants or more that differ, in seconds, one per line",
        )
    return instants


def _gaps(rate: float, random_: random.Random) -> Iterator[float]:
    while True:
        yield random_.expovariate(rate)


def _until(seconds: float, gaps: Iterator[float]) -> Iterator[float]:
    now = 0.0
    for _, gap in zip(range(MOST), gaps, strict=False):
        now += gap
        if now >= seconds:
            return
        yield now
