"""ONNX Runtime and onnxruntime-genai report to their makers unless they are kept from it.

Since 1.29 the wheels for Linux and macOS write a device id and a database below the user's cache
folder, a file .ses in TMPDIR, and send events about the process and its models, from the import
on (microsoft/onnxruntime pull requests 27379 and 29843). disable_telemetry_events() comes too late
for the first of them. The variable is read once, when the library is loaded.
"""

from __future__ import annotations

import os


def refuse_telemetry() -> None:
    """Call it before the import. Also holds for the processes started from this one."""
    os.putenv("ORT_DISABLE_TELEMETRY", "1")
