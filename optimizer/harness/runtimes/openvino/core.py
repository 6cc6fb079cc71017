"""The openvino package, and the one Core that a process opens models with.

A Core's CPU plugin gives the thread that first uses it a stack for signals (sigaltstack), and when
it is freed gives back the one from before. Freed in another order than the reverse, or by another
thread, OpenVINO 2026.4 leaves a thread with a stack that is no longer mapped: the next signal with
a handler, of which Python's Ctrl-C is one, is then a segmentation fault. So no plugin is freed
before the process ends.
"""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any

from ...errors import MachineError
from .privacy import unreported


def package() -> Any:
    """openvino. Raises MachineError when it is missing."""
    try:
        with unreported():
            import openvino
    except ImportError as e:
        raise MachineError(
            f"OpenVINO cannot be imported ({e})", fix="pip install openvino"
        ) from None
    return openvino


def core() -> Any:
    """The ov.Core. Raises MachineError."""
    return _shared("models")


def core_for_strings() -> Any:
    """Another, which knows the operators of texts that importing openvino_tokenizers adds to Cores
    made afterwards. Raises MachineError."""
    return _shared("strings")


_FIRST = Lock()  # two threads that open their first models at once get the same Core


def _shared(use: str) -> Any:
    with _FIRST:
        return _cached(use)


@cache
def _cached(use: str) -> Any:  # noqa: ARG001 - a Core for each
    return package().Core()
