"""Import openvino without its telemetry.

Since 2023 `import openvino` imports the model conversion tools (openvino.tools.ovc), which send an
event on import and write a client id to ~/intel (openvino-telemetry, required by openvino).
openvino/__init__.py works without these tools, and nothing here uses them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

REPORTING = "openvino.tools.ovc"


@contextmanager
def block_telemetry() -> Iterator[None]:
    """Block the conversion tools while openvino is imported in this context.

    Without effect if openvino was imported before. The tools can be imported later.
    """
    if REPORTING in sys.modules:
        yield
        return
    sys.modules[REPORTING] = None  # type: ignore[assignment] # its import raises ImportError
    try:
        yield
    finally:
        sys.modules.pop(REPORTING, None)
