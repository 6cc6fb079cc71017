"""Open the bundles of a server, and reload a model without losing a request.

A client names the model to reload, never a path: the path is the command line's, a folder, a tar or
a link to one, which is resolved again. The new version is verified, opened and warmed up while the
old one answers. Then requests move over, and the old version is closed once it has answered all
accepted requests. If anything fails before that, the old version stays. Called by commands/serve.py
and commands/application.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import HarnessError, InputError
from ...process.niceness import make_executor
from ..caches.cache import Cache
from ..caches.completion_cache import CompletionCache, SemanticLookup, open_semantic_cache
from ..inference import Service
from ..refusals import DrainingError, RequestError
from ..scheduling.decoding import Decoding
from ..warm_up.start import start_service
from .mirror import Mirror
from .trial import Terms, VersionTrial
from .versions import Served, Versions

if TYPE_CHECKING:
    import argparse

    from ...bundle.bundle import Bundle

OpenBundle = Callable[[Path | None, ExitStack], "Bundle"]
"""Opens the bundle at a path (None: the bundle that the harness is in), and closes it with the
stack. Raises HarnessError, and OSError for files that cannot be read."""


class BundleLoader:
    """Opens, reloads and closes the bundles of a server.

    open_bundle: function that opens a bundle
    args: options of `serve`
    versions: served versions, changed here
    say: function that logs one line
    """

    def __init__(
        self,
        open_bundle: OpenBundle,
        args: argparse.Namespace,
        versions: Versions,
        say: Callable[..., None],
    ) -> None:
        self._open_bundle, self._args, self._versions, self._say = open_bundle, args, versions, say
        self._paths: dict[Served, Path | None] = {}
        self._mirrors: dict[str, Mirror] = {}  # trials that run, by the name of the model
        self._cache = Cache(args.cache_mib << 20) if args.cache_mib else None
        self._semantic: SemanticLookup | None = None
        self._stack = ExitStack()  # of the encoder
        self._opening = make_executor(args.model_nice)
        self._one = asyncio.Lock()  # one warm-up at a time: two would distort each other's timing
        self._leaving = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Serve every bundle of the command line. Raises as `OpenBundle`, and MachineError."""
        self._semantic = await asyncio.to_thread(
            open_semantic_cache, self._open_bundle, self._args, self._stack, self._say
        )
        paths = (self._args.bundle, *self._args.beside)
        for number, path in enumerate(paths, 1):
            served = await self._open(path, number=number, of=len(paths))
            if served is not None:
                if self._args.trial is not None:
                    _terms(served, self._args)
                self._versions.add(served)
        if self._semantic is not None and not any(
            s.service.completion_cache for s in self._versions.all
        ):
            raise InputError(
                "no served model does text-generation",
                where="--semantic-cache-mib",
                accepted="with a text-generation model; others answer as fast as they embed",
            )

    async def load(self, name: str) -> None:
        """Reload a model's default version from its path; a bundle with the same digest changes
        nothing. Raises RequestError on failure; the old version then stays."""
        async with self._one:
            old = self._versions.find(name)
            if old.name in self._mirrors:
                raise RequestError("not loaded: a version of this model is on trial")
            try:
                new = await self._open(self._paths[old], old.digest)
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
                await self._close(new)
                raise RequestError("not loaded: another model has its name or version") from None

    async def close(self) -> None:
        """Wait until retired versions are closed, and close all other versions."""
        async with self._one:
            await asyncio.gather(*(task for m in self._mirrors.values() for task in m.tasks))
            await asyncio.gather(*self._leaving)
            for served in list(self._paths):
                await self._close(served)
            self._stack.close()

    def _replace(self, old: Served, new: Served) -> None:
        """Move the server's requests to the new version, or start its trial. Raises InputError,
        RequestError."""
        if self._versions.ending:
            raise DrainingError("the server is shutting down", retry_after=1.0)
        if new.name != old.name:
            raise InputError(f"the bundle is another model: {new.name!r:.80}", where="load")
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
        mirror = Mirror(old, new, VersionTrial(_terms(old, self._args)), lambda: self._end(mirror))
        self._mirrors[old.name] = mirror
        mirror.start()
        self._versions.set_share(new, trial)

    def _end(self, mirror: Mirror) -> None:
        """End a model's trial on the server: the new version replaces the old version, or is
        retired."""
        old, new, trial = mirror.old, mirror.new, mirror.trial
        del self._mirrors[old.name]
        mirror.stop()
        self._versions.set_share(new, 0)
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
        leaving = asyncio.create_task(self._close_left(old, self._versions.retire(old)))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _close_left(self, old: Served, closed: Coroutine[None, None, None]) -> None:
        await closed
        del self._paths[old]
        self._say(level="info", event="unloaded", model=old.name, version=old.version)

    async def _open(
        self, path: Path | None, unless: str = "", number: int = 1, of: int = 1
    ) -> Served | None:
        """Open and warm up, for the server, the bundle at a path; return None if its digest is
        `unless`.

        number: number of the bundle from 1, for the log
        of: number of bundles that are opened
        """
        stack = ExitStack()
        self._say(level="info", event="opening", bundle=str(path or "."), number=number, of=of)
        try:
            loop = asyncio.get_running_loop()
            bundle = await loop.run_in_executor(self._opening, self._open_bundle, path, stack)
            digest = str(bundle.manifest["digest"])
            if digest == unless:
                await asyncio.to_thread(stack.close)
                return None
            service = await start_service(bundle, self._args, self._say, self._opening)
            service.cache, service.digest = self._cache, digest
            self._add_caches(service, stack)
        except BaseException:
            stack.close()
            raise
        served = Served(service, digest, stack.close)
        self._paths[served] = path
        return served

    def _add_caches(self, service: Service, stack: ExitStack) -> None:
        """Give a text-generation model its caches; closing `stack` drops its semantic entries."""
        engine, alike = service.engine, self._semantic
        if not isinstance(engine, Decoding) or (self._cache is None and alike is None):
            return
        model, metrics = engine.model, engine.metrics
        service.completion_cache = CompletionCache(
            service.digest, self._cache, alike, model, metrics
        )
        if alike is not None:
            stack.callback(alike.cache.drop, service.digest)

    async def _close(self, served: Served) -> None:
        """Close the bundle of a version that is no longer served, or never was."""
        self._paths.pop(served, None)
        await served.service.engine.wait_until_drained()
        served.close()


def _terms(served: Served, args: argparse.Namespace) -> Terms:
    """Return the terms of a trial of this model. Raises InputError for missing or wrong options."""
    model, margin = served.service.engine.model, args.max_differing
    if model.task.generates:
        raise InputError(
            f"{served.name} does {model.task.name}, whose answers are not compared",
            where="--trial",
            accepted="models of other tasks",
        )
    if not margin:
        raise InputError("--max-differing is missing", where="--trial", accepted="a share above 0")
    if "embedding" in model.task.tensors(model.contract) and not args.same_cosine:
        raise InputError("--same-cosine is missing", where="--trial", accepted="such as 0.999")
    if not args.trial_confidence:
        raise InputError("0 was given", where="--trial-confidence", accepted="such as 0.95")
    return Terms(margin, args.trial_confidence, args.same_cosine or 1.0)
