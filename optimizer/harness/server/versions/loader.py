"""Opens the bundles that a server was started with, and a new version of one where it lies.

A client says which model is to be opened again, never from where: that is what the command line
named, a folder, a tar, or a link to one, which is followed anew. The new version is verified,
opened, warmed up and checked beside the old one, which answers meanwhile; then requests are moved
over, and the old one is closed when it has answered what it accepted. Whatever goes wrong before
that leaves the old one where it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import HarnessError, InputError
from ...process.niceness import executor
from ..caches.cache import Cache
from ..caches.recall import Recall, Semantic, semantic
from ..inference import Service
from ..refusals import DrainingError, RequestError
from ..scheduling.decoding import Decoding
from ..warm_up.starting import started
from .mirror import Mirror
from .trial import Terms, Trial
from .versions import Served, Versions

if TYPE_CHECKING:
    import argparse

    from ...bundle.bundle import Bundle

Opened = Callable[[Path | None, ExitStack], "Bundle"]
"""Opens what lies at a path (None: the bundle that the harness is in), and closes it with the
stack. Raises HarnessError, and OSError for what cannot be read."""


class Loader:
    """See the module. args: the options of serve. say: takes the fields of a log line."""

    def __init__(
        self, opened: Opened, args: argparse.Namespace, versions: Versions, say: Callable[..., None]
    ) -> None:
        self._opened, self._args, self._versions, self._say = opened, args, versions, say
        self._paths: dict[Served, Path | None] = {}
        self._mirrors: dict[str, Mirror] = {}  # trials that run, by the name of the model
        self._cache = Cache(args.cache_mib << 20) if args.cache_mib else None
        self._semantic: Semantic | None = None
        self._stack = ExitStack()  # of the encoder
        self._opening = executor(args.model_nice)
        self._one = asyncio.Lock()  # a warm-up at a time: two would time each other
        self._leaving = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Serve every bundle of the command line. Raises as `Opened`, and MachineError."""
        self._semantic = await asyncio.to_thread(
            semantic, self._opened, self._args, self._stack, self._say
        )
        for path in (self._args.bundle, *self._args.beside):
            served = await self._ready(path)
            if served is not None:
                if self._args.trial is not None:
                    _terms(served, self._args)
                self._versions.add(served)
        if self._semantic is not None and not any(s.service.recall for s in self._versions.all):
            raise InputError(
                "no model here continues texts",
                where="--semantic-cache-mib",
                accepted="beside one that does: to embed a text takes as long as to answer it",
            )

    async def load(self, name: str) -> None:
        """Open the bundle of this model's default version again; nothing is done where it is the
        same one. Raises RequestError, and then nothing has changed."""
        async with self._one:
            old = self._versions.of(name)
            if old.name in self._mirrors:
                raise RequestError("not loaded: a version of this model is on trial")
            try:
                new = await self._ready(self._paths[old], old.digest)
            except (HarnessError, OSError) as e:
                self._say(level="error", event="not_loaded", model=name, error=str(e)[:500])
                kind = type(e).__name__
                raise RequestError(f"not loaded ({kind}); the log says why") from None
            if new is None:
                self._say(level="info", event="unchanged", model=name, version=old.version)
                return
            try:
                self._replace(old, new)
            except (InputError, RequestError) as e:
                self._say(level="error", event="not_loaded", model=name, error=str(e)[:500])
                await self._dropped(new)
                raise RequestError("not loaded: its name or version is another's") from None

    async def close(self) -> None:
        """Wait for versions that are leaving; close what is still open."""
        async with self._one:
            await asyncio.gather(*(task for m in self._mirrors.values() for task in m.tasks))
            await asyncio.gather(*self._leaving)
            for served in list(self._paths):
                await self._dropped(served)
            self._stack.close()

    def _replace(self, old: Served, new: Served) -> None:
        """Move requests over. Raises InputError, RequestError."""
        if self._versions.ending:
            raise DrainingError("the server is ending", retry_after=1.0)
        if new.name != old.name:
            raise InputError(f"the bundle is of another model, {new.name!r:.80}", where="load")
        self._versions.add(new)
        trial = self._args.trial
        event = "loaded" if trial is None else "trial"
        self._say(
            level="info", event=event, model=new.name, version=new.version, before=old.version
        )
        if trial is None:
            self._versions.promote(new)
            self._leave(old)
            return
        mirror = Mirror(old, new, Trial(_terms(old, self._args)), lambda: self._end(mirror))
        self._mirrors[old.name] = mirror
        mirror.start()
        self._versions.give(new, trial)

    def _end(self, mirror: Mirror) -> None:
        """A trial is over: the new version takes the old one's place, or leaves."""
        old, new, trial = mirror.old, mirror.new, mirror.trial
        del self._mirrors[old.name]
        mirror.stop()
        self._versions.give(new, 0)
        passed = trial.verdict == "pass"
        self._say(
            level="info" if passed else "error",
            event="trial_passed" if passed else "trial_not_passed",
            model=new.name,
            version=new.version,
            verdict=trial.verdict,
            examples=trial.examples,
            differing=trial.differing,
        )
        if passed:
            self._versions.promote(new)
        if not self._versions.ending:
            self._leave(old if passed else new)

    def _leave(self, old: Served) -> None:
        leaving = asyncio.create_task(self._left(old, self._versions.retire(old)))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _left(self, old: Served, closed: Coroutine[None, None, None]) -> None:
        await closed
        del self._paths[old]
        self._say(level="info", event="unloaded", model=old.name, version=old.version)

    async def _ready(self, path: Path | None, unless: str = "") -> Served | None:
        """What lies at a path, warmed up; None where its digest is `unless`."""
        stack = ExitStack()
        try:
            loop = asyncio.get_running_loop()
            bundle = await loop.run_in_executor(self._opening, self._opened, path, stack)
            digest = str(bundle.manifest["digest"])
            if digest == unless:
                await asyncio.to_thread(stack.close)
                return None
            service = await started(bundle, self._args, self._say, self._opening)
            service.cache, service.digest = self._cache, digest
            self._remember(service, stack)
        except BaseException:
            stack.close()
            raise
        served = Served(service, digest, stack.close)
        self._paths[served] = path
        return served

    def _remember(self, service: Service, stack: ExitStack) -> None:
        """Give a model that continues texts the caches, of which nothing is left once its bundle is
        closed."""
        engine, alike = service.engine, self._semantic
        if not isinstance(engine, Decoding) or (self._cache is None and alike is None):
            return
        model, metrics = engine.model, engine.metrics
        service.recall = Recall(service.digest, self._cache, alike, model, metrics)
        if alike is not None:
            stack.callback(alike.cache.drop, service.digest)

    async def _dropped(self, served: Served) -> None:
        """Close what is served no more, or never was."""
        self._paths.pop(served, None)
        await served.service.engine.drained()
        served.close()


def _terms(served: Served, args: argparse.Namespace) -> Terms:
    """What a trial of this model goes by. Raises InputError for what is not said, or cannot be."""
    model, margin = served.service.engine.model, args.max_differing
    if model.task.generates:
        raise InputError(
            f"answers of {served.name} are not compared: it continues texts",
            where="--trial",
            accepted="models that answer in one run",
        )
    if not margin:
        raise InputError("--max-differing is missing", where="--trial", accepted="a share above 0")
    if "embedding" in model.task.tensors(model.contract) and not args.same_cosine:
        raise InputError("--same-cosine is missing", where="--trial", accepted="such as 0.999")
    if not args.trial_confidence:
        raise InputError("0 was given", where="--trial-confidence", accepted="such as 0.95")
    return Terms(margin, args.trial_confidence, args.same_cosine or 1.0)
