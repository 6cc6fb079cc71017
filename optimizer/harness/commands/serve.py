"""Command `serve`: warm a bundle up, answer until SIGTERM, end without losing a request."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..server.from_options import application, named_hosts, say
from ..server.grpc.server import GrpcServer, check_installed
from ..server.http import uvicorn_http
from ..server.http.app import App
from ..server.http.listening import addresses, exposed
from ..server.http.plain_http import Server
from ..server.options import CONNECTIONS
from ..server.versions.loader import Loader, OpenBundle
from .ask import ask

if TYPE_CHECKING:
    import argparse

SWITCH = 0.0005  # seconds until the model's thread hands the GIL to the event loop; Python's 5 ms
# are as long as a short answer


def run(open_bundle: OpenBundle, args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises as Bundle does."""
    loopback = all(a.loopback for a in addresses(args.host, args.port))
    if not (loopback or args.token_file or args.insecure):
        raise exposed(args.host)
    app, tracer = application(args, named_hosts(args, loopback=loopback))
    if not (loopback or args.token_file):
        message = f"every client that reaches {args.host} is answered without a token (--insecure)"
        say(level="warning", event="insecure", message=message)
    sys.setswitchinterval(SWITCH)
    runner = asyncio.Runner(loop_factory=_loop_factory(args))
    try:
        with runner:
            runner.run(_serve(open_bundle, app, args))
    finally:
        if tracer is not None:
            tracer.close()
    return 0


async def _serve(open_bundle: OpenBundle, app: App, args: argparse.Namespace) -> None:
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    server: Server | uvicorn_http.Server
    if args.plain or not uvicorn_http.installed():
        server = Server(app, args.client_seconds, CONNECTIONS, args.client_connections)
    else:
        server = uvicorn_http.Server(
            app, args.client_seconds, CONNECTIONS, args.client_connections, app.refused
        )
    await server.start(args.host, args.port)
    grpc = await _grpc(app, args)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    http = type(server).__module__
    say(level="info", event="listening", host=args.host, port=server.port, http=http)
    loader = Loader(open_bundle, args, app.versions, say)
    try:
        await loader.start()
        app.load = partial(_load, loader)
        _freeze_loaded_objects()
        first = app.first()
        names = [f"{s.name} {s.version}" for s in app.versions.all]
        say(level="info", event="ready", model=first.name, version=first.version, serves=names)
        if args.ask is None:
            await ending.wait()
        else:
            await ask(first, (args.host, server.port), app.security.token, args.ask)
        say(level="info", event="draining", waiting=app.versions.waiting)
        await app.versions.drained()
    finally:
        if grpc is not None:
            await grpc.close(args.client_seconds)
        await server.close()
        await loader.close()
    say(level="info", event="ended")


async def _load(loader: Loader, name: str) -> None:
    await loader.load(name)
    _freeze_loaded_objects()


def _freeze_loaded_objects() -> None:
    """Exclude loaded objects from garbage collection, whose full runs stop the event loop for 20 to
    30 ms, every 2 s under load. Objects that died since are freed at the next call."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def _grpc(app: App, args: argparse.Namespace) -> GrpcServer | None:
    if args.grpc_port is None:
        return None
    check_installed()
    server = GrpcServer(app, CONNECTIONS, args.client_connections)
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
