"""Check that a limit of this process leaves enough addresses for the libraries."""

from __future__ import annotations

from optimizer.foundation.errors import MachineError

ADDRESSES = 3 << 30
"""Bytes of addresses that torch, transformers, datasets and ONNX Runtime take before a model is
read, rounded up: VmPeak of /proc/self/status after their imports is 2.0 to 2.6 GB (x86-64 Linux,
torch for CPU; it grows with the cores). `check` and `plan` need them too: of a tiny BERT, `check`
under `ulimit -v 900000` and `plan` under 2100000 say that the data cannot be read."""


def check() -> None:
    """Raise MachineError where `ulimit -v` leaves fewer addresses than the libraries take, which
    end the process without a message."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
    except ImportError:  # a system without such limits
        return
    limit = getrlimit(RLIMIT_AS)[0]
    if limit != RLIM_INFINITY and limit < ADDRESSES:
        raise MachineError(
            f"a process may have {limit >> 20:,} MiB of addresses here (ulimit -v)",
            where="this machine",
            accepted=f"{ADDRESSES >> 20:,} MiB or more, and what the model takes",
            fix="Run ulimit -v unlimited first, and limit memory by a container instead.",
        )
