"""Speed of this machine, from a probe of a fraction of a second, for the times in `plan`.

Each figure is the best of several runs on one thread, in processor time, so that other work on the
machine changes it little. Times of several threads take `threads` into account.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from optimizer.foundation.process import threads

RUNS = 5
ROWS, WIDTH = 512, 2048  # of the timed product, enough to be bound by multiplication
CACHED, GROUP = 1 << 18, 128  # values that stay in the processor's cache, in rows
COPIED = 1 << 23  # values that do not
DIGESTED = 1 << 22  # bytes
INTEGERS = 256  # rows and columns of the timed product of integers: torch has slow ones, too
LOOPED = 20_000  # turns of the timed loop in Python


@dataclass(frozen=True)
class MachineSpeed:
    """Speed of one processor thread, from which `plan` predicts times of stages, and the number of
    threads that torch uses.

    products: multiply-adds per second of a float32 matrix product
    integers: multiply-adds per second of an int8 matrix product, at least `products`
    values: operations per second on float32 values in the cache, elementwise or sums of rows
    bytes: bytes per second that a copy in memory reads and writes
    digested: bytes per second of SHA-256
    interpreted: iterations per second of a Python loop that changes a dictionary
    """

    products: float
    integers: float
    values: float
    bytes: float
    digested: float
    interpreted: float
    threads: int

    def multiply(self, count: float) -> float:
        """Predict this machine's seconds for `count` multiply-adds of matrix products on all
        threads."""
        return count / (self.products * self.threads)

    def compute(self, count: float) -> float:
        """Predict this machine's seconds for `count` operations on values in the cache, on all
        threads."""
        return count / (self.values * self.threads)

    def digest(self, count: float) -> float:
        """Predict this machine's seconds for the SHA-256 of `count` bytes."""
        return count / self.digested

    def interpret(self, turns: float) -> float:
        """Predict the seconds for Python code that costs as much as `turns` iterations of the
        measured loop."""
        return turns / self.interpreted

    def move(self, count: float) -> float:
        """Predict this machine's seconds for reading and writing `count` bytes; threads share the
        memory's bandwidth."""
        return count / self.bytes


@cache
def measure() -> MachineSpeed:
    """Probe this machine's speed in a fraction of a second, once per process, for the times that
    stages predict in `plan`."""
    import torch

    (alone,) = threads.map_in_threads(lambda _: _measure(), [None])
    return replace(alone, threads=torch.get_num_threads())


def _measure() -> MachineSpeed:
    """Time each kind of work on one thread, from which predictions of `plan` follow."""
    import torch

    x, w = torch.full((ROWS, WIDTH), 0.5), torch.full((WIDTH, WIDTH), 0.5)
    near, far = torch.full((CACHED // GROUP, GROUP), 0.5), torch.zeros(COPIED)
    each, copy = torch.full((len(near), 1), 0.5), torch.empty_like(far)

    small = torch.ones(INTEGERS, INTEGERS, dtype=torch.int8)
    table = dict[int, int]()

    def change() -> None:
        (near / each).round_().clamp_(-7, 7).mul_(each).sub_(near).square_().sum(-1)

    def loop() -> None:
        for turn in range(LOOPED):
            table[turn & 63] = turn + 1

    product = ROWS * WIDTH * WIDTH / _fastest(lambda: torch.nn.functional.linear(x, w))
    integers = INTEGERS**3 / _fastest(lambda: torch._int_mm(small, small))
    moved = _fastest(lambda: copy.copy_(far))
    text = bytes(DIGESTED)
    return MachineSpeed(
        products=product,
        integers=max(integers, product),
        values=7 * CACHED / _fastest(change),
        bytes=2 * far.nbytes / moved,
        digested=DIGESTED / _fastest(lambda: hashlib.sha256(text)),
        interpreted=LOOPED / _fastest(loop),
        threads=1,
    )


def _fastest(run: Callable[[], object]) -> float:
    """Measure this machine by the least processor time, in seconds, of RUNS runs after a warm-up
    run."""
    times = []
    for _ in range(1 + RUNS):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return max(min(times[1:]), 1e-6)
