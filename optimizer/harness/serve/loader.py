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

from ..errors import HarnessError, InputError
from .refusals import DrainingError, RequestError
from .starting import model, started
from .versions import Served, Versions

if TYPE_CHECKING:
    import argparse

    from ..bundle import Bundle

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
        self._one = asyncio.Lock()  # a warm-up at a time: two would time each other
        self._leaving = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Serve every bundle of the command line. Raises as `Opened`, and MachineError."""
        for path in (self._args.bundle, *self._args.beside):
            served = await self._ready(path)
            if served is not None:
                self._versions.add(served)

    async def load(self, name: str) -> None:
        """Open the bundle of this model's default version again; nothing is done where it is the
        same one. Raises RequestError, and then nothing has changed."""
        async with self._one:
            old = self._versions.of(name)
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
            await asyncio.gather(*self._leaving)
            for served in list(self._paths):
                await self._dropped(served)

    def _replace(self, old: Served, new: Served) -> None:
        """Move requests over. Raises InputError, RequestError."""
        if self._versions.ending:
            raise DrainingError("the server is ending", retry_after=1.0)
        if new.name != old.name:
            raise InputError(f"the bundle is of another model, {new.name!r:.80}", where="load")
        self._versions.add(new)
        self._versions.promote(new)
        self._say(
            level="info", event="loaded", model=new.name, version=new.version, before=old.version
        )
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
            bundle = await asyncio.to_thread(self._opened, path, stack)
            digest = str(bundle.manifest["digest"])
            if digest == unless:
                await asyncio.to_thread(stack.close)
                return None
            loaded = await asyncio.to_thread(model, bundle, self._args)
            service = await started(loaded, self._args, self._say)
        except BaseException:
            stack.close()
            raise
        served = Served(service, digest, stack.close)
        self._paths[served] = path
        return served

    async def _dropped(self, served: Served) -> None:
        """Close what is served no more, or never was."""
        self._paths.pop(served, None)
        await served.service.engine.drained()
        served.close()
