"""Ends of processes that work together: a new process imports this, and little else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path

from optimizer.foundation.process import launch as launches
from optimizer.foundation.process.launch import Processes


def end(these: Processes) -> None:
    if these.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    these.sums([0.0])


def disconnect() -> None:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket
            connection = socket.socket(fileno=os.dup(int(descriptor)))
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)


def disconnect_after(file: Path) -> None:
    while not file.exists():
        pass
    disconnect()
    signal.pause()  # until torch ends it, as it has seen the other


def fail_and_linger(these: Processes, folder: Path, error: Exception) -> None:
    if these.rank == 1:
        last = folder / launches.FAILURE
        threading.Thread(target=disconnect_after, args=(last,)).start()  # is waited for at the end
        raise error
    these.sums([0.0])


def be_killed_last(these: Processes) -> None:
    if these.rank == 1:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        disconnect()
        signal.pause()
    these.sums([0.0])


def wait(these: Processes, folder: Path) -> None:
    (folder / f"{os.getpid()}.pid").touch()
    signal.pause()
