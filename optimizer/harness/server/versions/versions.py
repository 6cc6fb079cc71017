"""Route requests to versions of models, while versions are added and retired. On the event loop.

    with versions.lease(name, version) as service:    while a request may submit work
    versions.add(served)                              another model, or another version of one
    versions.promote(served)                          default for requests that name no version
    await versions.retire(served)                     no new leases; closed after the last one

Law: a request is answered by the version that it leased. A version is drained only when its last
lease has ended, and closed only when all accepted requests are answered: no request is lost, and
none is answered twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError
from ..inference import Service
from ..observe.metrics import Counter, write_exposition
from ..refusals import DrainingError, UnknownError


@dataclass(eq=False)
class Served:
    """Version of a model that is served.

    digest: digest of its bundle
    close: function that closes the bundle, called once the version is drained
    leases: number of requests that may still submit work to this version
    """

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
    def every_name(self) -> set[str]:
        """Return the names that a request may give: of the models, and of the adapters."""
        return {*self.service.names, *self.service.openai_names}

    @property
    def version(self) -> str:
        return self.service.version

    @contextmanager
    def lease(self) -> Iterator[Service]:
        """Yield the service; this version is not drained during the `with`."""
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
    """A model's version that answers a share of the requests that name no version.

    due: sum of shares since its last answer; at 1 it answers, and 1 is subtracted
    """

    served: Served
    share: float
    due: float = 0.0


class Versions:
    """All versions of all models that a server serves; leases to each request the version that
    answers it."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}  # by the name of the model
        self._models: dict[str, list[Served]] = {}  # by name; the first is the default
        self._leaving: list[Served] = []
        self.ending = False

    @property
    def ready(self) -> bool:
        """Return True if the server answers requests: models loaded, warmed up, not shutting
        down."""
        current = [versions[0] for versions in self._models.values()]
        return (
            bool(current)
            and not self.ending
            and not any(s.service.engine.draining for s in current)
        )

    @property
    def all(self) -> list[Served]:
        """Return all served versions, the default version of each model before its others."""
        return [served for versions in self._models.values() for served in versions]

    @property
    def current(self) -> list[Served]:
        """Return the default version of each model, which answers requests that name no version."""
        return [versions[0] for versions in self._models.values()]

    @property
    def waiting(self) -> int:
        """Return the number of rows and texts in all of the server's queues."""
        return sum(s.service.engine.waiting for s in (*self.all, *self._leaving))

    def find(self, name: str, version: str = "") -> Served:
        """Find a version of a model; "" is its default version. Raises UnknownError; DrainingError
        before the first model is loaded."""
        if not self._models:
            raise DrainingError("the model is not ready yet", retry_after=1.0)
        versions = [s for s in self.all if name in s.service.names]
        matching = [s for s in versions if version in ("", s.version)]
        if matching:
            return matching[0]
        adapted = [s.name for s in self.all if name in s.service.openai_names]
        if adapted and not versions:
            raise UnknownError(
                f"{name} is an adapter of model {adapted[0]}; ask that model, with the parameter "
                f"adapter: {name}"
            )
        here = versions or self.all
        names = sorted({n for s in here for n in s.service.names})
        numbers = [s.version for s in versions]
        raise UnknownError(
            f"unknown model or version; here {'is' if len(names) == 1 else 'are'} "
            f"{' and '.join(names)}" + (f", version {' and '.join(numbers)}" if numbers else "")
        )

    def route(self, name: str, version: str = "") -> Served:
        """Choose the version that answers a request: a version on trial gets its share of requests
        that name no version. Raises as `find`."""
        served = self.find(name, version)
        share = self._shares.get(name)
        if version or share is None:
            return served
        share.due += share.share
        if share.due < 1:
            return served
        share.due -= 1
        return share.served

    def set_share(self, served: Served, share: float) -> None:
        """Send a share of its model's requests to this version; 0 ends that."""
        self._shares.pop(served.name, None)
        if share:
            self._shares[served.name] = _Share(served, share)

    @contextmanager
    def lease(self, name: str, version: str = "") -> Iterator[Service]:
        """Lease the model's service that answers a request. Raises as `find`."""
        with self.route(name, version).lease() as service:
            yield service

    def check(self, served: Served) -> None:
        """Raise InputError for a name or version that the server has already."""
        for other in self.all:
            if other.name != served.name:
                both = sorted(other.every_name & served.every_name)
                if both:
                    raise InputError(f"two models are called {both[0]!r}", where="serve")
            elif other.version == served.version:
                raise InputError(
                    f"version {served.version} of {served.name} is already served",
                    where="serve",
                    fix="Set another version in its recipe and package it again.",
                )

    def add(self, served: Served) -> None:
        """Serve a model's version; a model's first version is its default. Raises as `check`."""
        self.check(served)
        self._models.setdefault(served.name, []).append(served)

    def promote(self, served: Served) -> None:
        """Make a served version the default of its model."""
        versions = self._models[served.name]
        versions.remove(served)
        versions.insert(0, served)

    def retire(self, served: Served) -> Coroutine[None, None, None]:
        """Lease a version no more; the coroutine closes it once its requests are answered."""
        versions = self._models[served.name]
        versions.remove(served)
        if not versions:
            del self._models[served.name]
        self._leaving.append(served)
        return self._left(served)

    async def _left(self, served: Served) -> None:
        await served.idle.wait()
        await served.service.engine.wait_until_drained()
        served.close()
        self._leaving.remove(served)

    async def wait_until_drained(self) -> None:
        """Refuse new requests, and wait until all accepted requests are answered."""
        self.ending = True
        for served in self.all:
            served.service.engine.drain()
        for served in (*self.all, *self._leaving):
            await served.service.engine.wait_until_drained()

    def index(self) -> bytes:
        """Return the list of served models as Triton's repository index has it, as JSON."""
        ready = [(s, "READY", "") for s in self.all]
        leaving = [(s, "UNLOADING", "answers accepted requests") for s in self._leaving]
        rows = [
            {"name": s.name, "version": s.version, "state": state, "reason": reason}
            for s, state, reason in (*ready, *leaving)
        ]
        return json.dumps(rows).encode()

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return Triton's statistics of the versions of a model; "" takes all. Raises as `find`."""
        if name:
            self.find(name, version)
        return [
            served.service.statistics(model)
            for served in self.all
            for model in served.service.names
            if name in ("", model) and version in ("", served.version)
        ]

    def metrics(self, *others: Counter) -> str:
        """Return the text of /metrics: metrics of all versions, and `others`."""
        metrics = [s.service.engine.metrics for s in (*self.all, *self._leaving)]
        return write_exposition(metrics, others)
