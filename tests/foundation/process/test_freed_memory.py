"""Memory that is freed goes back to the machine, but where it is soon used again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another C library's memory is its own"
)
SCRIPT = """
import sys
import numpy as np
from optimizer.foundation.process import freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

def work():
    "160 MB for a moment, in arrays that glibc keeps by then, and something small behind them."
    arrays = [np.ones(1 << 20) for _ in range(20)]
    return bytes(1000)

work()
before = resident()
with freed_memory.keep_freed_memory(1 << 30):
    small = [work() for _ in range(2)]
    inside = resident()
after = resident()
small += [work() for _ in range(2)]
print(before, inside, after, resident())
"""


def test_it_is_kept_within_and_returned_after() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    ).stdout
    before, inside, after, later = map(int, printed.split())
    assert inside - before > 100  # MiB: the test can tell
    assert after - before < 20
    assert later - before < 100  # later allocations are returned without give_back
