"""Import openvino, and hold the one Core per process that opens models.

A Core is never freed before the process ends. The CPU plugin sets a signal stack (sigaltstack) for
the thread that first uses it, and restores the previous one when it is freed. Freed in another
order or by another thread, OpenVINO 2026.4 leaves a thread with an unmapped signal stack, and the
next handled signal, such as Python's Ctrl-C, is a segmentation fault.
"""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any

from ...errors import MachineError
from .privacy import block_telemetry


def import_package() -> Any:
    """Import openvino. Raises MachineError if it is missing."""
    try:
        with block_telemetry():
            import openvino
    except ImportError as e:
        raise MachineError(
            f"OpenVINO cannot be imported ({e})", fix="pip install openvino"
        ) from None
    return openvino


def open_core() -> Any:
    """Return the shared ov.Core. Raises MachineError."""
    return _shared("models")


def core_for_strings() -> Any:
    """Return a second ov.Core, for models with string operators. Raises MachineError.

    Importing openvino_tokenizers adds these operators only to Cores created afterwards.
    """
    return _shared("strings")


_FIRST = Lock()  # threads that open their first models at once share a Core


def _shared(use: str) -> Any:
    with _FIRST:
        return _cached(use)


@cache
def _cached(use: str) -> Any:  # noqa: ARG001 - one Core per use
    return import_package().Core()
