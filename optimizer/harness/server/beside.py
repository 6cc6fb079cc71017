"""Work of requests that is done beside the event loop: large bodies unpacked, parsed and tokenized,
chat templates rendered, large answers written.

It has a few threads. Requests that wait for one are taken client by client in turn, so that the
large requests of one client delay another by what is running and one piece of work at most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Value = TypeVar("Value")

SMALL = 20_000  # bytes or characters that are read on the event loop: it takes less than a thread
LARGE = 100_000  # bytes of an answer that are written on the event loop, in two milliseconds
THREADS = 2  # of one Beside; most of their work holds Python's lock, so that more gain little


class Beside:
    """Made on the event loop. threads: pieces of work that run at once."""

    def __init__(self, threads: int = THREADS) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(threads, "beside")
        self._free = threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next client first

    async def run(self, client: str, work: Callable[[], Value]) -> Value:
        """The result of the work, or what it raises. client: whose request it belongs to. Work that
        runs when it is cancelled keeps its thread until it ends."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(client)
        try:
            future = self._threads.submit(work)
        except BaseException:
            self._next()
            raise
        future.add_done_callback(self._done)
        return await asyncio.wrap_future(future)

    async def _turn(self, client: str) -> None:
        turn = self._loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had a thread already
                self._next()
            raise

    def _done(self, future: Future[Value]) -> None:
        """In the thread, or on the loop where the work was cancelled before it began."""
        del future
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._next)

    def _next(self) -> None:
        """A thread is free: for the client that has waited longest since its last turn."""
        while self._waiting:
            client, turns = next(iter(self._waiting.items()))
            del self._waiting[client]
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind the others
            if not turn.done():  # as when its client has gone
                turn.set_result(None)
                return
        self._free += 1
