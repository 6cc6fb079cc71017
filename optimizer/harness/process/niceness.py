"""The threads of a model give way to the event loop's.

On Linux niceness and scheduling policy are a thread's own, and the threads that it starts have them
too (setpriority(2), "C library/kernel differences"; sched(7)): the pool of a runtime has those of
the thread that opened the model. Requests are so read and refused while the model computes. Where
nothing else wants a processor neither changes anything. No privilege is needed to become nicer, and
one to become less so.

A nicer thread gets less of a processor that others want, and yet may keep it to the end of its
slice, milliseconds, when one of them wakes. A thread of SCHED_IDLE is stopped at once, and a
processor that has only such threads counts as idle where the kernel looks for one. It has next to
nothing where the others want all: there must be more processors than threads of the server's own,
which is one.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

NICEST = 19
IDLE = NICEST + 1  # SCHED_IDLE


def give_way(niceness: int) -> None:
    """Make the calling thread so much nicer than it is; IDLE: only what nothing else wants is left
    to it, or as nice as can be where a sandbox does not allow that. Elsewhere than on Linux, where
    niceness is the whole process's, nothing is done."""
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(now + niceness, NICEST))
        if niceness == IDLE:
            with suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def executor(niceness: int) -> ThreadPoolExecutor:
    """One thread that opens models, and whose niceness theirs have."""
    return ThreadPoolExecutor(1, "opening", give_way, (niceness,))
