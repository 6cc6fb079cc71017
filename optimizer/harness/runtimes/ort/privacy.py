"""Disable the telemetry of ONNX Runtime and onnxruntime-genai.

Since 1.29 the wheels for Linux and macOS write a device id and a database to the user's cache
folder and a file .ses to TMPDIR, and send events about the process and its models, starting at
import (microsoft/onnxruntime pull requests 27379 and 29843). disable_telemetry_events() is too late
for the first events. The environment variable is read once, when the library is loaded.
"""

from __future__ import annotations

import os


def disable_telemetry() -> None:
    """Disable ONNX Runtime's telemetry in this process and its children. Call before the import."""
    os.putenv("ORT_DISABLE_TELEMETRY", "1")
