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
from ..generate.loop import PREFILL
from . import arrivals, memory, slots, uvicorn_http
from .app import App, Security
from .ask import ask
from .batching import Limits, Scheduler
from .decoding import Decoding
from .engine import Engine
from .grpc_server import GrpcServer, check_installed
from .inference import Service
from .metrics import Metrics
from .model import Inputs, Model
from .plain_http import Server
from .text_metrics import TextMetrics
from .text_model import Room, TextModel
from .warm_up import warm_up

if TYPE_CHECKING:
    import argparse

    from ..bundle import Bundle

BATCHES = 2  # of full batches that may wait where the queue stands
SHORTEST_TARGET = 0.02  # seconds
BURST = 2  # times the target may wait in a burst
WAITING = 4096  # rows
CONNECTIONS = 1000
SHARE = 0.5  # of the free memory, for the cache of texts that are continued
SWITCH = 0.0005  # seconds until the model's thread lets the event loop go on: Python's 5 ms are as
# long as many an answer takes


def run(opened: Callable[[], Bundle], args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. opened: opens the bundle; raises as Bundle does."""
    security = Security(_token(args.token_file), args.max_body, args.client_seconds)
    app = App(security, say)
    sys.setswitchinterval(SWITCH)
    runner = asyncio.Runner(loop_factory=_loop_factory(args))
    with runner:
        runner.run(_serve(opened, app, args))
    return 0


def say(**fields: Any) -> None:
    """One JSON line on standard error."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **fields}
    print(json.dumps(line), file=sys.stderr, flush=True)


async def _serve(opened: Callable[[], Bundle], app: App, args: argparse.Namespace) -> None:
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
    loaded = None
    try:
        loaded = await asyncio.to_thread(lambda: model(opened(), args))
        app.service = await started(loaded, args, say)
        say(level="info", event="ready", model=loaded.name, version=loaded.version)
        if args.ask is None:
            await ending.wait()
        else:
            await ask(app.service, (args.host, server.port), _token(args.token_file), args.ask)
        say(level="info", event="draining", waiting=app.service.engine.waiting)
        await app.service.engine.drained()
    finally:
        if grpc is not None:
            await grpc.close(args.client_seconds)
        await server.close()
        if loaded is not None:
            loaded.close()
    say(level="info", event="ended")


async def _grpc(app: App, args: argparse.Namespace) -> GrpcServer | None:
    if args.grpc_port is None:
        return None
    check_installed()
    server = GrpcServer(app, args.max_body, _token(args.token_file))
    port = await server.start(args.host, args.grpc_port)
    say(level="info", event="listening", host=args.host, grpc_port=port)
    return server


def model(bundle: Bundle, args: argparse.Namespace) -> Model | TextModel:
    """The bundle as a server uses it. Raises InputError, MachineError."""
    if not bundle.task.generates:
        return Model(bundle, Inputs(args.max_texts))
    free = memory.free()
    most = None if free is None else int(SHARE * free)
    return TextModel(bundle, Room(args.slots, args.context, args.max_texts), most)


async def started(
    model: Model | TextModel, args: argparse.Namespace, say: Callable[..., None]
) -> Service:
    """The model warmed up and behind a scheduler. say: takes the fields of a log line."""
    if isinstance(model, TextModel):
        engine = await _continuing(model, args, say)
        return Service(engine, model.version, args.timeout)
    return Service(await _answering(model, args, say), model.version, args.timeout)


async def _continuing(
    model: TextModel, args: argparse.Namespace, say: Callable[..., None]
) -> Decoding:
    measured = await asyncio.to_thread(arrivals.measured, model, args.batching)
    wait = args.max_wait or args.timeout
    limits = slots.Limits(model.room.slots, WAITING, wait, measured.piece)
    say(
        level="info",
        event="warmed_up",
        engine=model.target,
        sharing=measured.sharing,
        difference=measured.difference,
        steady=measured.steady,
        slots=model.room.slots,
        context=model.context,
        cache_mib=model.cache_bytes >> 20,
        compared=measured.compared,
        prompt_piece=measured.piece,
        step_ms=round(1000 * measured.step.seconds(1), 3),
        full_step_ms=round(1000 * measured.step.seconds(model.room.slots), 3),
        max_wait_ms=round(1000 * wait, 3),
    )
    costs = slots.Costs(measured.read.seconds, measured.step.seconds)
    metrics = TextMetrics({"model": model.name, "version": model.version})
    return Decoding(model, slots.Scheduler(limits, costs, PREFILL), metrics, say)


async def _answering(model: Model, args: argparse.Namespace, say: Callable[..., None]) -> Engine:
    costs, sharing = await asyncio.to_thread(warm_up, model, args.rows, args.batching)
    rows = 1 if model.sharing == "alone" else args.rows
    full = costs.seconds(model.contract.longest, rows)
    target = args.max_wait or max(SHORTEST_TARGET, BATCHES * full)
    limits = Limits(rows, args.delay_ms / 1000, target, BURST * target, WAITING)
    say(
        level="info",
        event="warmed_up",
        engine=model.target,
        sharing=sharing.how,
        difference=sharing.difference,
        compared=sharing.batches,
        full_batch_ms=round(1000 * full, 3),
        max_wait_ms=round(1000 * target, 3),
    )
    metrics = Metrics({"model": model.name, "version": model.version})
    return Engine(model, Scheduler(limits, costs.seconds), metrics, say)


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
