"""The openvino package, and the one Core that a process opens models with.

A Core's CPU plugin gives the thread that first uses it a stack for signals (sigaltstack), and when
it is freed gives back the one from before. Freed in another order than the reverse, or by another
thread, OpenVINO 2026.4 leaves a thread with a stack that is no longer mapped: the next signal with
a handler, of which Python's Ctrl-C is one, is then a segmentation fault. So no plugin is freed
before the process ends.
"""

from __future__ import annotations

from functools import cache
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


@cache
def core() -> Any:
    """The ov.Core. Raises MachineError."""
    return package().Core()


@cache
def core_for_strings() -> Any:
    """Another, which knows the operators of texts that importing openvino_tokenizers adds to Cores
    made afterwards. Raises MachineError."""
    return package().Core()
