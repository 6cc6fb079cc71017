"""`serve`: open a bundle, warm it up, answer until SIGTERM, then end without losing a request."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError
from . import uvicorn_http
from .app import App, Security
from .ask import ask
from .grpc_server import GrpcServer, check_installed
from .loader import Loader, Opened
from .plain_http import Server
from .tracing import sending

if TYPE_CHECKING:
    import argparse

CONNECTIONS = 1000  # and calls over gRPC
SWITCH = 0.0005  # seconds until the model's thread lets the event loop go on: Python's 5 ms are as
# long as many an answer takes


def run(opened: Opened, args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. opened: opens a bundle; raises as Bundle does."""
    security = Security(_token(args.token_file), args.max_body, args.client_seconds)
    tracer = sending(args.otlp_endpoint, say) if args.otlp_endpoint else None
    app = App(security, say, tracer)
    sys.setswitchinterval(SWITCH)
    runner = asyncio.Runner(loop_factory=_loop_factory(args))
    try:
        with runner:
            runner.run(_serve(opened, app, args))
    finally:
        if tracer is not None:
            tracer.close()
    return 0


def say(**fields: Any) -> None:
    """One JSON line on standard error."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **fields}
    print(json.dumps(line), file=sys.stderr, flush=True)


async def _serve(opened: Opened, app: App, args: argparse.Namespace) -> None:
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    kind = Server if args.plain or not uvicorn_http.installed() else uvicorn_http.Server
    server = kind(app, args.client_seconds, CONNECTIONS)
    try:
        await server.start(args.host, args.port)
    except OSError as e:
        raise MachineError(
            f"cannot listen ({e.strerror})", where=f"{args.host}:{args.port}", fix="Try --port 0."
        ) from None
    grpc = await _grpc(app, args)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    say(level="info", event="listening", host=args.host, port=server.port, http=kind.__module__)
    loader = Loader(opened, args, app.versions, say)
    try:
        await loader.start()
        app.load = loader.load
        first = app.first()
        names = [f"{s.name} {s.version}" for s in app.versions.all]
        say(level="info", event="ready", model=first.name, version=first.version, serves=names)
        if args.ask is None:
            await ending.wait()
        else:
            await ask(first, (args.host, server.port), _token(args.token_file), args.ask)
        say(level="info", event="draining", waiting=app.versions.waiting)
        await app.versions.drained()
    finally:
        if grpc is not None:
            await grpc.close(args.client_seconds)
        await server.close()
        await loader.close()
    say(level="info", event="ended")


async def _grpc(app: App, args: argparse.Namespace) -> GrpcServer | None:
    if args.grpc_port is None:
        return None
    check_installed()
    server = GrpcServer(app, args.max_body, _token(args.token_file), CONNECTIONS)
    port = await server.start(args.host, args.grpc_port)
    say(level="info", event="listening", host=args.host, grpc_port=port)
    return server


def _loop_factory(args: argparse.Namespace) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if args.plain or not uvicorn_http.installed():
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, ValueError) as e:
        raise InputError(f"cannot be read ({e})", where=str(path)) from None
    if not token:
        raise InputError("it is empty", where=str(path), accepted="a token on one line")
    return token
