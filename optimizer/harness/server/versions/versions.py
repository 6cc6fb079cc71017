"""Which version of which model answers a request, while versions come and go. On the event loop.

    with versions.lease(name, version) as service:    for as long as a request may submit work
    versions.add(served)                              another model, or another version of one
    versions.promote(served)                          what requests get that name no version
    await versions.retire(served)                     no lease more; closed after the last

Law: a request is answered by the version that it leased. That one is drained only when its last
lease has ended, and closed only when all that it accepted is answered: none is lost, and none is
answered twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...errors import InputError
from ..inference import Service
from ..observe.metrics import exposition
from ..refusals import DrainingError, UnknownError


@dataclass(eq=False)
class Served:
    """One version. digest: of its bundle. close: called once it is drained."""

    service: Service
    digest: str
    close: Callable[[], object]
    leases: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def version(self) -> str:
        return self.service.version

    @contextmanager
    def lease(self) -> Iterator[Service]:
        """Keeps it from being drained meanwhile."""
        self.leases += 1
        self.idle.clear()
        try:
            yield self.service
        finally:
            self.leases -= 1
            if not self.leases:
                self.idle.set()


@dataclass
class _Share:
    """A version that answers a share of what names no version. due: of the next request."""

    served: Served
    share: float
    due: float = 0.0


class Versions:
    """See the module."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}  # by the name of the model
        self._models: dict[str, list[Served]] = {}  # by name; the first is the one by default
        self._leaving: list[Served] = []
        self.ending = False

    @property
    def ready(self) -> bool:
        """Whether a request would be answered: loaded, warmed up, not ending."""
        current = [versions[0] for versions in self._models.values()]
        return (
            bool(current)
            and not self.ending
            and not any(s.service.engine.draining for s in current)
        )

    @property
    def all(self) -> list[Served]:
        """Those that answer, the default version of each model before its others."""
        return [served for versions in self._models.values() for served in versions]

    @property
    def current(self) -> list[Served]:
        """The default version of each model."""
        return [versions[0] for versions in self._models.values()]

    @property
    def sole(self) -> Service | None:
        """What answers every request, whatever model and version it names that are here; None where
        that is not one."""
        if len(self._models) != 1 or self._shares:
            return None
        (versions,) = self._models.values()
        return versions[0].service if len(versions) == 1 else None

    @property
    def waiting(self) -> int:
        """Rows and texts that wait for a model."""
        return sum(s.service.engine.waiting for s in (*self.all, *self._leaving))

    def of(self, name: str, version: str = "") -> Served:
        """The version that a request means; without one, the default. Raises UnknownError, and
        DrainingError while there is no model yet."""
        if not self._models:
            raise DrainingError("the model is not ready yet", retry_after=1.0)
        versions = [s for s in self.all if name in s.service.names]
        matching = [s for s in versions if version in ("", s.version)]
        if matching:
            return matching[0]
        here = versions or self.all
        names = sorted({n for s in here for n in s.service.names})
        numbers = [s.version for s in versions]
        raise UnknownError(
            f"unknown model or version; here {'is' if len(names) == 1 else 'are'} "
            f"{' and '.join(names)}" + (f", version {' and '.join(numbers)}" if numbers else "")
        )

    def chosen(self, name: str, version: str = "") -> Served:
        """The version that answers a request: `of`, or the one that has a share of those which name
        no version. Raises as `of`."""
        served = self.of(name, version)
        share = self._shares.get(name)
        if version or share is None:
            return served
        share.due += share.share
        if share.due < 1:
            return served
        share.due -= 1
        return share.served

    def give(self, served: Served, share: float) -> None:
        """This version answers so large a share of its model's requests; 0 ends that."""
        self._shares.pop(served.name, None)
        if share:
            self._shares[served.name] = _Share(served, share)

    @contextmanager
    def lease(self, name: str, version: str = "") -> Iterator[Service]:
        """The service that answers a request. Raises as `of`."""
        with self.chosen(name, version).lease() as service:
            yield service

    def check(self, served: Served) -> None:
        """Raises InputError where it cannot stand beside the others."""
        for other in self.all:
            if other.name != served.name:
                both = sorted({*other.service.names} & {*served.service.names})
                if both:
                    raise InputError(f"two models are called {both[0]!r}", where="serve")
            elif other.version == served.version:
                raise InputError(
                    f"version {served.version} of {served.name} is served already",
                    where="serve",
                    fix="Give a bundle with other content another version.",
                )

    def add(self, served: Served) -> None:
        """Serve it: by default if it is the first of its model, and else by its version alone.
        Raises InputError for one whose name or version is taken."""
        self.check(served)
        self._models.setdefault(served.name, []).append(served)

    def promote(self, served: Served) -> None:
        """The default of its model from now on."""
        versions = self._models[served.name]
        versions.remove(served)
        versions.insert(0, served)

    def retire(self, served: Served) -> Coroutine[None, None, None]:
        """No lease of it from now on; what is to be awaited answers what it has and closes it."""
        versions = self._models[served.name]
        versions.remove(served)
        if not versions:
            del self._models[served.name]
        self._leaving.append(served)
        return self._left(served)

    async def _left(self, served: Served) -> None:
        await served.idle.wait()
        await served.service.engine.drained()
        served.close()
        self._leaving.remove(served)

    async def drained(self) -> None:
        """Accept nothing more, and wait until all that was accepted is answered."""
        self.ending = True
        for served in self.all:
            served.service.engine.drain()
        for served in (*self.all, *self._leaving):
            await served.service.engine.drained()

    def index(self) -> bytes:
        """Triton's list of what is served, as JSON."""
        ready = [(s, "READY", "") for s in self.all]
        leaving = [(s, "UNLOADING", "answers what it accepted") for s in self._leaving]
        rows = [
            {"name": s.name, "version": s.version, "state": state, "reason": reason}
            for s, state, reason in (*ready, *leaving)
        ]
        return json.dumps(rows).encode()

    def metrics(self) -> str:
        """Of all versions, as /metrics gives it."""
        return exposition([s.service.engine.metrics for s in (*self.all, *self._leaving)])
