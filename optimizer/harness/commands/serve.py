"""Command `serve`: warm a bundle up, answer until SIGTERM, end without losing a request."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..server.grpc.server import PACKAGES, GrpcServer
from ..server.http.app import App
from ..server.http.hosts import Hosts
from ..server.http.listening import refuse_exposed, resolve_addresses
from ..server.http.request import Security
from ..server.http.server import HttpServer
from ..server.observe.tracing import Tracer, start_tracer
from ..server.options import CONNECTIONS, check_installed
from ..server.versions.loader import BundleLoader, OpenBundle
from ..shown import escape_lines
from ..trust.plain_file import read_secret
from .ask import ask

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

LARGEST_TOKEN = 64 << 10  # bytes of its file
SWITCH = 0.0005  # seconds until the model's thread hands the GIL to the event loop; Python's 5 ms
# are as long as a short answer


def run(open_bundle: OpenBundle, args: argparse.Namespace) -> int:
    """Run the command `serve` until SIGTERM or SIGINT; return the exit code.

    open_bundle: function that opens bundles (opening.make_opener)
    args: options of `serve`

    Raises the errors of Bundle.
    """
    loopback = all(a.loopback for a in resolve_addresses(args.host, args.port))
    if not (loopback or args.token_file or args.insecure):
        raise refuse_exposed(args.host)
    app, tracer = application(args, choose_hosts(args, loopback=loopback))
    if not (loopback or args.token_file):
        message = f"every client that reaches {args.host} is answered without a token (--insecure)"
        say(level="warning", event="insecure", message=message)
    sys.setswitchinterval(SWITCH)
    runner = asyncio.Runner(loop_factory=_loop_factory())
    try:
        with runner:
            runner.run(_serve(open_bundle, app, args))
    finally:
        if tracer is not None:
            tracer.close()
    return 0


async def _serve(open_bundle: OpenBundle, app: App, args: argparse.Namespace) -> None:
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    server = HttpServer(app, args.client_seconds, CONNECTIONS, args.client_connections)
    await server.start(args.host, args.port)
    grpc = await _grpc(app, args)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    say(level="info", event="listening", host=args.host, port=server.port)
    loader = BundleLoader(open_bundle, args, app.versions, say)
    try:
        await _start(loader, ending)
        app.load = partial(_load, loader)
        _freeze_loaded_objects()
        first = app.first_service()
        names = [f"{s.name} {s.version}" for s in app.versions.all]
        say(level="info", event="ready", model=first.name, version=first.version, serves=names)
        if args.ask is None:
            await ending.wait()
        else:
            await ask(first, (args.host, server.port), app.security.token, args.ask)
        say(level="info", event="draining", waiting=app.versions.waiting)
        await app.versions.wait_until_drained()
    finally:
        if grpc is not None:
            await grpc.close(args.client_seconds)
        await server.close()
        await loader.close()
    say(level="info", event="ended")


async def _start(loader: BundleLoader, ending: asyncio.Event) -> None:
    """Open and warm up the bundles of the command `serve`; end the process with exit code 0 if
    `ending` is set meanwhile.

    The thread that opens a bundle or runs its model cannot be interrupted, and Python would wait
    for it. No request was accepted yet, and a later run removes temporary folders.
    """
    starting = asyncio.ensure_future(loader.start())
    stopping = asyncio.ensure_future(ending.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        message = "ended by a signal during warm-up; no request was accepted"
        say(level="info", event="ended", message=message)
        os._exit(0)
    stopping.cancel()
    await starting


async def _load(loader: BundleLoader, name: str) -> None:
    await loader.load(name)
    _freeze_loaded_objects()


def _freeze_loaded_objects() -> None:
    """Exclude, in `serve`, loaded objects from garbage collection, whose full runs stop the event
    loop for 20 to 30 ms, every 2 s under load. Objects that died since are freed at the next
    call."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def _grpc(app: App, args: argparse.Namespace) -> GrpcServer | None:
    if args.grpc_port is None:
        return None
    check_installed("--grpc-port", PACKAGES)
    server = GrpcServer(app, CONNECTIONS, args.client_connections)
    port = await server.start(args.host, args.grpc_port)
    say(level="info", event="listening", host=args.host, grpc_port=port)
    return server


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]


def application(args: argparse.Namespace, hosts: Hosts | None) -> tuple[App, Tracer | None]:
    """Make for the command `serve` (application, still without a bundle; tracer of its spans, or
    None).

    args: options of `serve`
    hosts: accepted names of the server; None: any

    Raises InputError and MachineError for options that cannot be served.
    """
    token = "" if args.token_file is None else read_token(args.token_file, _warn)
    security = Security(token, args.max_body, args.client_seconds, args.max_values, hosts)
    tracer = start_tracer(args.otlp_endpoint, say) if args.otlp_endpoint else None
    return App(security, say, tracer), tracer


def choose_hosts(args: argparse.Namespace, *, loopback: bool) -> Hosts | None:
    """Return for the command `serve` the names that a request's Host header may have; None: any.

    loopback: True if only this machine reaches the server
    """
    if not args.allowed_host and not loopback:
        return None
    return Hosts(frozenset(name.lower() for name in (args.host, *args.allowed_host)))


def read_token(path: Path, warn: Callable[[str], None]) -> str:
    """Read for the command `serve` the bearer token that clients must send from a file, without
    white space around it.

    warn: receives a warning if other users may use the file

    Raises the InputError of `read_secret`, and InputError for a file that is empty or not UTF-8.
    """
    where, accepted = str(path), "a regular file that holds a token"
    try:
        text = read_secret(path, warn, LARGEST_TOKEN).decode("utf-8").strip()
    except UnicodeDecodeError as e:
        raise InputError(f"it is not UTF-8 ({e})", where=where, accepted=accepted) from None
    if not text:
        raise InputError("it is empty", where=where, accepted=accepted)
    return text


def _warn(message: str) -> None:
    say(level="warning", event="token_file", message=message)


def say(**fields: Any) -> None:
    """Write the fields and the time as one JSON line to standard error, the log of the command
    `serve`."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"time": now, **fields}
    text = escape_lines(json.dumps(line))
    sys.stderr.write(f"{text}\n")  # at once: `print` writes the end of a line by itself
    sys.stderr.flush()
