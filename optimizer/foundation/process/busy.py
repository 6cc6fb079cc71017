"""Load of this machine by all of its processes."""

from __future__ import annotations

import os

QUIET = 0.5  # running processes per core up to which times are as on a quiet machine


def describe() -> str:
    """Return "load 3.6 on 2 cores" where the mean load of the last minute is above QUIET per core.
    Return "" for a lower load, and where the system does not report it."""
    try:
        running = os.getloadavg()[0]
    except (OSError, AttributeError):  # Windows has none
        return ""
    cores = os.cpu_count() or 1
    many = "s" if cores > 1 else ""
    return f"load {running:.1f} on {cores} core{many}" if running > QUIET * cores else ""
