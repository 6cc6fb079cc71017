"""Build the service of an open bundle: warm the model up, choose limits, create its scheduler.

Called by versions/loader.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import tasks
from ...errors import InputError
from ...generate.loop import PREFILL
from ...process import memory
from ...runtimes.ort.run import cores
from ..inference import Service
from ..model import RequestLimits, ServedModel
from ..observe.metrics import Metrics, TextMetrics
from ..options import Settings, choose_settings
from ..scheduling.batching import BatchLimits, BatchScheduler
from ..scheduling.decoding import Decoding
from ..scheduling.engine import BatchEngine
from ..scheduling.prefix_cache import PrefixCache
from ..scheduling.slots import SlotCosts, SlotLimits, SlotScheduler
from ..text_model import Room, TextModel
from . import generation
from .warm_up import Progress, warm_up

if TYPE_CHECKING:
    import argparse

    from ...bundle.bundle import Bundle

BATCHES = 2  # full batches that may wait while the queue stands (CoDel target)
SHORTEST_TARGET = 0.02  # seconds
BURST = 2  # multiple of the target that may wait in a burst
WAITING = 4096  # maximum rows in the queue
SHARE = 0.5  # share of the free memory that KV caches may take


async def start_service(
    bundle: Bundle,
    args: argparse.Namespace,
    say: Callable[..., None],
    executor: Executor | None = None,
) -> Service:
    """Warm a server's bundle up, start its engine and return its Service.

    args: options of `serve`
    say: function that logs one line
    executor: thread that runs the warm-up; None: the event loop's default executor

    Raises InputError, MachineError.
    """
    off_loop = partial(asyncio.get_running_loop().run_in_executor, executor)
    settings = choose_settings(bundle.manifest, args)
    if bundle.task.generates:
        if args.prompt_lookup and bundle.contract.adapters:
            raise InputError(
                f"{bundle.manifest['name']} has adapters, with which guessed tokens are not proven",
                where="--prompt-lookup",
                accepted="models without adapters",
            )
        free = memory.read_free()
        prefixes = args.prefix_cache_mib << 20
        most = None if free is None else max(int(SHARE * free) - prefixes, 0)
        room = Room(settings.slots, settings.context, args.max_texts, args.max_answer)
        text_model = await off_loop(TextModel, bundle, room, most)
        decoding = await _start_generation(text_model, settings, args, say, off_loop)
        return Service(decoding, text_model.version, args.timeout, args.max_answer)
    for option in ("prefix_cache_mib", "prompt_lookup"):
        if getattr(args, option):
            raise InputError(
                f"{bundle.manifest['name']} does {bundle.task.name}",
                where=f"--{option.replace('_', '-')}",
                accepted="models for text-generation",
            )
    model = ServedModel(bundle, RequestLimits(args.max_texts, settings.rows))
    if settings.workers > 1 and not model.reentrant:
        settings = _one_worker(settings, model, args, say)
    engine = await _start_batching(model, settings, args, say, off_loop)
    return Service(engine, model.version, args.timeout, args.max_answer)


def _progress(name: str, say: Callable[..., None]) -> Progress:
    """Return a function that logs each step of a model's warm-up, with the time left."""

    def tell(step: str, number: int, of: int, seconds: float | None) -> None:
        left = {} if seconds is None else {"seconds_left": math.ceil(seconds)}
        say(level="info", event="warming_up", model=name, step=step, number=number, of=of, **left)

    return tell


def _one_worker(
    settings: Settings, model: ServedModel, args: argparse.Namespace, say: Callable[..., None]
) -> Settings:
    """Reduce the server's workers to 1, for an engine that runs one batch at a time.

    Workers of the recipe may be meant for another engine of the bundle and are reduced with a
    warning; raises InputError for workers of this server's options.
    """
    what = f"{settings.workers}, but engine {model.target} runs one batch at a time"
    if args.workers or args.settings:
        raise InputError(what, where="workers", accepted="1; more with ONNX Runtime on a CPU")
    say(level="warning", event="one_worker", message=f"serve.workers of the recipe is {what}")
    return replace(settings, workers=1)


async def _start_generation(
    model: TextModel,
    settings: Settings,
    args: argparse.Namespace,
    say: Callable[..., None],
    off_loop: Callable[..., Awaitable[Any]],
) -> Decoding:
    measure = partial(generation.measure_model, progress=_progress(model.name, say))
    measured = await off_loop(measure, model, args.batching, args.prompt_lookup)
    prefixes = None
    most = args.prefix_cache_mib << 20
    if most and await off_loop(generation.prefixes_hold, model, measured.piece):
        prefixes = PrefixCache(model.slots, measured.piece, most)
    wait = settings.max_wait or args.timeout
    limits = SlotLimits(model.room.slots, WAITING, wait, measured.piece)
    say(
        level="info",
        event="warmed_up",
        engine=model.target,
        sharing=measured.sharing,
        difference=measured.difference,
        steady=measured.steady,
        prompt_lookup=args.prompt_lookup,
        slots=model.room.slots,
        context=model.context,
        cache_mib=model.cache_bytes >> 20,
        compared=measured.compared,
        prompt_piece=measured.piece,
        piece_ms=round(1000 * measured.read.seconds(measured.piece), 3),
        prefixes=prefixes is not None,
        step_ms=round(1000 * measured.step.seconds(1), 3),
        full_step_ms=round(1000 * measured.step.seconds(model.room.slots), 3),
        max_wait_ms=round(1000 * wait, 3),
    )
    costs = SlotCosts(measured.read.seconds, measured.step.seconds)
    metrics = TextMetrics({"model": model.name, "version": model.version}, model.context)
    return Decoding(
        model,
        SlotScheduler(limits, costs, PREFILL),
        metrics,
        say,
        prefixes,
        args.model_nice,
        guessed=measured.guess_seconds,
    )


async def _start_batching(
    model: ServedModel,
    settings: Settings,
    args: argparse.Namespace,
    say: Callable[..., None],
    off_loop: Callable[..., Awaitable[Any]],
) -> BatchEngine:
    progress = _progress(model.name, say)
    costs, sharing = await off_loop(warm_up, model, settings.rows, args.batching, progress)
    rows = 1 if model.sharing == "alone" else settings.rows
    full = max(costs.seconds(length, rows) for length in costs.lengths)
    target = settings.max_wait or max(SHORTEST_TARGET, BATCHES * full)
    limits = BatchLimits(
        rows, settings.delay_ms / 1000, target, BURST * target, WAITING, settings.workers
    )
    say(
        level="info",
        event="warmed_up",
        engine=model.target,
        sharing=sharing.how,
        difference=sharing.difference,
        compared=sharing.batches,
        rows=rows,
        delay_ms=settings.delay_ms,
        workers=settings.workers,
        most_workers=cores() if model.reentrant else 1,
        threads=model.threads,
        full_batch_ms=round(1000 * full, 3),
        max_wait_ms=round(1000 * target, 3),
    )
    labels = {"model": model.name, "version": model.version}
    metrics = Metrics(labels, tasks.longest(model.contract))
    return BatchEngine(model, BatchScheduler(limits, costs.seconds), metrics, say, args.model_nice)
