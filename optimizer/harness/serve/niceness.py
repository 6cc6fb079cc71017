"""The threads of a model give way to the event loop's.

On Linux niceness is a thread's own, and the threads that it starts have it too (setpriority(2),
"C library/kernel differences"; sched(7)): the pool of a runtime has that of the thread that opened
the model. A thread that waits for work and is less nice than what runs gets a processor at once, so
that requests are read and refused while the model computes. Where nothing else wants a processor
niceness changes nothing. No privilege is needed to become nicer, and one to become less so.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

NICEST = 19


def give_way(niceness: int) -> None:
    """Make the calling thread so much nicer than it is. Elsewhere than on Linux, where niceness is
    the whole process's, nothing is done."""
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(now + niceness, NICEST))


def executor(niceness: int) -> ThreadPoolExecutor:
    """One thread that opens models, and whose niceness theirs have."""
    return ThreadPoolExecutor(1, "opening", give_way, (niceness,))
