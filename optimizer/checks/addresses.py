"""Check that `ulimit -v` leaves the libraries enough address space."""

from __future__ import annotations

from optimizer.foundation.errors import MachineError

ADDRESSES = 3 << 30
"""Bytes of address space that torch, transformers, datasets and ONNX Runtime take on import,
rounded up: VmPeak is 2.0 to 2.6 GB (x86-64 Linux, torch for CPU; it grows with the cores). `check`
and `plan` need it too: under less, their data cannot be read."""


def check() -> None:
    """Check before a run: raise MachineError where `ulimit -v` leaves less address space than the
    libraries reserve. They would otherwise end the process without a message."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
    except ImportError:  # a system without such limits
        return
    limit = getrlimit(RLIMIT_AS)[0]
    if limit != RLIM_INFINITY and limit < ADDRESSES:
        raise MachineError(
            f"processes are limited to {limit >> 20:,} MiB of address space (ulimit -v)",
            where="this machine",
            accepted=f"{ADDRESSES >> 20:,} MiB plus the size of the model, or more",
            fix="Run ulimit -v unlimited first; limit memory by a container instead.",
        )
