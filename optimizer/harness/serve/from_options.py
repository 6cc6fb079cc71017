"""What the options of serve decide before a bundle is opened: who is answered, and what is said."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..plain_file import read
from .app import App, Security
from .tracing import Tracer, sending

if TYPE_CHECKING:
    import argparse


def application(args: argparse.Namespace) -> tuple[App, Tracer | None]:
    """What answers, while no bundle is loaded, and what makes its spans. args: of `serve`. Raises
    InputError, MachineError."""
    security = Security(token(args.token_file), args.max_body, args.client_seconds)
    tracer = sending(args.otlp_endpoint, say) if args.otlp_endpoint else None
    return App(security, say, tracer), tracer


def token(path: Path | None) -> str:
    """What clients must send; "" for none. Raises InputError."""
    if path is None:
        return ""
    try:
        text = read(path).decode("utf-8").strip()
    except ValueError as e:
        raise InputError(f"cannot be read ({e})", where=str(path)) from None
    if not text:
        raise InputError("it is empty", where=str(path), accepted="a token on one line")
    return text


def say(**fields: Any) -> None:
    """One JSON line on standard error."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **fields}
    sys.stderr.write(f"{json.dumps(line)}\n")  # at once: `print` writes the end of a line by itself
    sys.stderr.flush()
