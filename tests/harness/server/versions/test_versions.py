"""Versions come and go while requests are answered: simulated, every step in a random order."""

import asyncio
import random
from typing import Any, cast

import pytest

from optimizer.harness.errors import InputError
from optimizer.harness.server.inference import Service
from optimizer.harness.server.observe.metrics import Metrics, write_exposition
from optimizer.harness.server.refusals import DrainingError, UnknownError
from optimizer.harness.server.versions.versions import Served, Versions


class Engine:
    """Answers later, in any order; refuses once it drains, as the real ones do."""

    def __init__(self, chance: random.Random) -> None:
        self.draining, self.waiting, self.closed = False, 0, False
        self._chance, self._empty = chance, asyncio.Event()

    async def answer(self) -> None:
        assert not self.closed
        if self.draining:
            raise DrainingError("the server is ending")
        self.waiting += 1
        await steps(self._chance)
        assert not self.closed
        self.waiting -= 1
        if not self.waiting:
            self._empty.set()

    def drain(self) -> None:
        self.draining = True

    async def wait_until_drained(self) -> None:
        self.drain()
        while self.waiting:
            self._empty.clear()
            await self._empty.wait()


async def steps(chance: random.Random) -> None:
    """As many turns of the event loop as reading a body or running a batch may take."""
    for _ in range(chance.randrange(30)):
        await asyncio.sleep(0)


def served(name: str, version: str, chance: random.Random) -> Served:
    engine: Any = Engine(chance)
    service: Any = type("Service", (), {})()
    service.name, service.version, service.engine = name, version, engine
    service.names, service.openai_names = [name, f"{name}-tensors"], [name]

    def close() -> None:
        assert engine.draining
        assert not engine.waiting
        engine.closed = True

    return Served(cast(Service, service), version, close)


@pytest.mark.parametrize("seed", range(20))
def test_no_request_is_lost_or_answered_twice_while_versions_are_replaced(seed: int) -> None:
    chance = random.Random(seed)
    versions = Versions()
    answered: list[tuple[int, str]] = []
    everyone: list[Served] = []
    leaving: list[asyncio.Task[None]] = []

    async def request(number: int) -> None:
        await steps(chance)
        with versions.lease("m") as service:
            await steps(chance)  # its body comes, and is encoded
            await cast(Any, service.engine).answer()
            answered.append((number, service.version))

    def replace(version: int) -> None:
        new, old = served("m", str(version), chance), list(versions.all)
        everyone.append(new)
        versions.add(new)
        versions.promote(new)
        leaving.extend(asyncio.create_task(versions.retire(o)) for o in old)

    async def run() -> None:
        replace(0)
        requests = list[asyncio.Task[None]]()
        for i in range(60):
            requests.append(asyncio.create_task(request(i)))
            await asyncio.sleep(0)
            if chance.random() < 0.1:
                replace(i + 1)
        await asyncio.gather(*requests, *leaving)
        assert sorted(n for n, _ in answered) == list(range(60))
        assert [cast(Any, s.service.engine).closed for s in everyone[:-1]] == [True] * (
            len(everyone) - 1
        )
        assert versions.all == everyone[-1:]
        assert len({v for _, v in answered}) > 1 or len(everyone) == 1

    asyncio.run(run())


def test_a_version_that_is_not_the_default_is_asked_by_its_number_alone() -> None:
    async def run() -> None:
        chance, versions = random.Random(0), Versions()
        with pytest.raises(DrainingError):
            versions.find("m")
        one, two, other = (served(*x, chance) for x in (("m", "1"), ("m", "2"), ("n", "1")))
        for each in (one, two, other):
            versions.add(each)
        assert versions.find("m") is versions.find("m-tensors", "1") is one
        assert versions.find("m", "2") is two
        assert versions.find("n") is other
        assert versions.current == [one, other]
        for wrong in (("o", ""), ("m", "3"), ("../m", ""), ("n", "2")):
            with pytest.raises(UnknownError):
                versions.find(*wrong)
        versions.promote(two)
        assert versions.find("m") is two
        assert versions.ready
        two.service.engine.drain()
        assert not versions.ready

    asyncio.run(run())


@pytest.mark.parametrize(("name", "version"), [("m", "1"), ("m-tensors", "7")])
def test_a_name_or_version_that_is_taken_is_refused(name: str, version: str) -> None:
    async def run() -> None:
        versions = Versions()
        versions.add(served("m", "1", random.Random(0)))
        with pytest.raises(InputError):
            versions.add(served(name, version, random.Random(0)))
        assert len(versions.all) == 1

    asyncio.run(run())


def test_metrics_of_several_versions_have_each_name_once() -> None:
    metrics = [Metrics({"model": "m", "version": v}) for v in ("1", "2")]
    metrics[1].success.add(3)
    lines = write_exposition(metrics).splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    at = lines.index("# TYPE nv_inference_request_success counter")
    assert lines[at + 1 : at + 3] == [
        'nv_inference_request_success{model="m",version="1"} 0',
        'nv_inference_request_success{model="m",version="2"} 3',
    ]
