"""OpenVINO reports to its makers unless it is kept from it.

Since 2023 `import openvino` imports the tools that convert models of other frameworks
(openvino.tools.ovc), and these send an event on import and leave a client's id in ~/intel
(openvino-telemetry, which the openvino package requires). Where they cannot be imported
openvino/__init__.py goes on without them; nothing of them is used here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

REPORTING = "openvino.tools.ovc"


@contextmanager
def unreported() -> Iterator[None]:
    """Import openvino inside. Who imports the tools afterwards gets them, and what they send. Where
    somebody has imported openvino before, nothing is left to keep it from."""
    if REPORTING in sys.modules:
        yield
        return
    sys.modules[REPORTING] = None  # type: ignore[assignment] # its import raises ImportError
    try:
        yield
    finally:
        sys.modules.pop(REPORTING, None)
