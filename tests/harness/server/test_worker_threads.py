"""Work beside the event loop: client by client; one that leaves frees what it waited for."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from optimizer.harness.server.worker_threads import WorkerThreads


def on_loop(test: Callable[[WorkerThreads], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(20):
            await test(WorkerThreads(1))

    asyncio.run(run())


def test_clients_are_taken_in_turn_however_much_one_of_them_sends() -> None:
    async def test(beside: WorkerThreads) -> None:
        go, order = threading.Event(), list[str]()
        first = asyncio.create_task(beside.run("a", go.wait))
        await asyncio.sleep(0)
        owners = ["a"] * 5 + ["b"] * 2
        rest = [asyncio.create_task(beside.run(o, lambda o=o: order.append(o))) for o in owners]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, *rest)
        assert order == ["a", "b", "a", "b", "a", "a", "a"]

    on_loop(test)


def test_work_that_fails_raises_for_whom_it_was_done_and_stops_nobody() -> None:
    async def test(beside: WorkerThreads) -> None:
        def fails() -> None:
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await beside.run("a", fails)
        assert await beside.run("a", threading.get_ident) != threading.get_ident()

    on_loop(test)


def test_clients_that_leave_before_and_while_they_have_a_thread_free_it() -> None:
    async def test(beside: WorkerThreads) -> None:
        go = threading.Event()
        running = asyncio.create_task(beside.run("a", go.wait))
        waiting = [asyncio.create_task(beside.run("a", lambda: None)) for _ in range(3)]
        await asyncio.sleep(0.01)
        for task in (running, *waiting):
            task.cancel()
        later = asyncio.create_task(beside.run("b", lambda: "done"))
        await asyncio.sleep(0.05)
        assert not later.done()  # the thread is still busy with what was left
        go.set()
        assert await later == "done"

    on_loop(test)
