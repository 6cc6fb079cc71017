"""What the options of serve decide before a bundle is opened: who is answered, and what is said."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..shown import many_lines
from ..trust.plain_file import read_secret
from .http.app import App, Security
from .http.hosts import Hosts
from .observe.tracing import Tracer, sending

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

LARGEST_TOKEN = 64 << 10  # bytes of its file


def application(args: argparse.Namespace, hosts: Hosts | None) -> tuple[App, Tracer | None]:
    """Make the application, without a bundle, and the tracer of its spans. args: of `serve`. hosts:
    accepted names of the server; None: any. Raises InputError, MachineError."""
    token = "" if args.token_file is None else read_token(args.token_file, _warn)
    security = Security(token, args.max_body, args.client_seconds, args.max_values, hosts)
    tracer = sending(args.otlp_endpoint, say) if args.otlp_endpoint else None
    return App(security, say, tracer), tracer


def named_hosts(args: argparse.Namespace, *, loopback: bool) -> Hosts | None:
    """Choose the names that a request's Host header may have; None: any. loopback: only this
    machine reaches the server."""
    if not args.allowed_host and not loopback:
        return None
    return Hosts(frozenset(name.lower() for name in (args.host, *args.allowed_host)))


def read_token(path: Path, warn: Callable[[str], None]) -> str:
    """The text in a file, without space around it. warn: as `read_secret` has it. Raises InputError
    as that, and for a file that is empty or not UTF-8."""
    where, accepted = str(path), "a regular file that holds a token"
    try:
        text = read_secret(path, warn, LARGEST_TOKEN).decode("utf-8").strip()
    except UnicodeDecodeError as e:
        raise InputError(f"cannot be read ({e})", where=where, accepted=accepted) from None
    if not text:
        raise InputError("it is empty", where=where, accepted=accepted)
    return text


def _warn(message: str) -> None:
    say(level="warning", event="token_file", message=message)


def say(**fields: Any) -> None:
    """One JSON line on standard error."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **fields}
    text = many_lines(json.dumps(line))
    sys.stderr.write(f"{text}\n")  # at once: `print` writes the end of a line by itself
    sys.stderr.flush()
