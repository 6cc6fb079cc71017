"""Lower the priority of a model's threads below the event loop's, so that a busy server reads and
refuses requests in time.

On Linux niceness and scheduling policy belong to a thread, and threads that it starts inherit them
(setpriority(2), "C library/kernel differences"; sched(7)): a runtime's pool has those of the thread
that opened the model. Without contention for processors neither has an effect. Raising niceness
needs no privilege; lowering it does.

A nicer thread may keep a processor to the end of its slice (milliseconds) when another one wakes. A
SCHED_IDLE thread is preempted at once, but gets almost nothing under contention: the machine must
have more processors than the server has other threads, which is one.
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
    """Raise the niceness of the calling thread, so that other threads run first.

    Does nothing on systems other than Linux, where niceness belongs to the process.

    niceness: value to add; IDLE also sets SCHED_IDLE, where the system allows it
    """
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(now + niceness, NICEST))
        if niceness == IDLE:
            with suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def make_executor(niceness: int) -> ThreadPoolExecutor:
    """Return an executor of one thread of low priority that opens models; their threads inherit its
    niceness."""
    return ThreadPoolExecutor(1, "opening", give_way, (niceness,))
