"""A bundle as a server answers with it: opened, warmed up, behind a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..generate.loop import PREFILL
from . import arrivals, memory, slots
from .batching import Limits, Scheduler
from .decoding import Decoding
from .engine import Engine
from .inference import Service
from .metrics import Metrics
from .model import Inputs, Model
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
SHARE = 0.5  # of the free memory, for the cache of texts that are continued


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
