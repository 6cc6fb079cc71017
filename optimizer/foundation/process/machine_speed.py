"""Speed of this machine, from a probe of a fraction of a second, for the times in `plan`.

Each figure is the best of several runs on one thread, in processor time, so that other work on the
machine changes it little. Times of several threads take `threads` into account.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from optimizer.foundation.process import threads

RUNS = 5
ROWS, WIDTH = 512, 2048  # of the timed product, enough to be bound by multiplication
CACHED, GROUP = 1 << 18, 128  # values that stay in the processor's cache, in rows
COPIED = 1 << 23  # values that do not
DIGESTED = 1 << 22  # bytes


@dataclass(frozen=True)
class MachineSpeed:
    """Speed of one thread, and the number of threads that torch uses.

    products: multiply-adds per second of a float32 matrix product
    values: operations per second on float32 values in the cache, elementwise or sums of rows
    bytes: bytes per second that a copy in memory reads and writes
    digested: bytes per second of SHA-256
    """

    products: float
    values: float
    bytes: float
    digested: float
    threads: int

    def multiply(self, count: float) -> float:
        """Seconds for this many multiply-adds of matrix products on all threads."""
        return count / (self.products * self.threads)

    def compute(self, count: float) -> float:
        """Seconds for this many operations on values in the cache, on all threads."""
        return count / (self.values * self.threads)

    def digest(self, count: float) -> float:
        """Seconds for the SHA-256 of this many bytes."""
        return count / self.digested

    def move(self, count: float) -> float:
        """Seconds for reading and writing this many bytes; threads share the memory."""
        return count / self.bytes


@cache
def measure() -> MachineSpeed:
    """Measure this machine, once per process."""
    import torch

    (speeds,) = threads.each(lambda _: _measure(), [None])
    return MachineSpeed(*speeds, torch.get_num_threads())


def _measure() -> tuple[float, float, float, float]:
    import torch

    x, w = torch.full((ROWS, WIDTH), 0.5), torch.full((WIDTH, WIDTH), 0.5)
    near, far = torch.full((CACHED // GROUP, GROUP), 0.5), torch.zeros(COPIED)
    each, copy = torch.full((len(near), 1), 0.5), torch.empty_like(far)

    def change() -> None:
        (near / each).round_().clamp_(-7, 7).mul_(each).sub_(near).square_().sum(-1)

    product = _fastest(lambda: torch.nn.functional.linear(x, w))
    moved = _fastest(lambda: copy.copy_(far))
    text = bytes(DIGESTED)
    return (
        ROWS * WIDTH * WIDTH / product,
        7 * CACHED / _fastest(change),
        2 * far.nbytes / moved,
        DIGESTED / _fastest(lambda: hashlib.sha256(text)),
    )


def _fastest(run: Callable[[], object]) -> float:
    """Least processor time in seconds of RUNS runs after a first one."""
    times = []
    for _ in range(1 + RUNS):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return max(min(times[1:]), 1e-6)
