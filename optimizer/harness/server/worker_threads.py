"""Run work of requests in threads beside the event loop, fairly among clients.

For large bodies (unpack, parse, tokenize), chat templates, and large answers. Clients take turns at
the threads, so that the large requests of one client delay another client by the running work and
at most one more piece.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Value = TypeVar("Value")

SMALL = 20_000  # maximum bytes or characters read on the event loop, which is faster than a thread
TOKENIZED = 2_000  # maximum characters tokenized on the event loop: about 0.6 ms of MiniLM's tokens
LARGE = 100_000  # maximum bytes of an answer written on the event loop, in two milliseconds
THREADS = 2  # most of the work holds Python's lock, so that more threads gain little


class WorkerThreads:
    """Thread pool of a server, shared fairly among clients. Made on the event loop.

    threads: number of threads
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(threads, "requests")
        self._free = threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # next client first

    async def run(self, client: str, work: Callable[[], Value]) -> Value:
        """Run `work` for a client in a thread when it is its turn; return its result or raise its
        exception.

        client: address of the client

        Cancelled work that already runs keeps its thread until it ends.
        """
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
            if turn.done() and not turn.cancelled():  # it already had a thread
                self._next()
            raise

    def _done(self, future: Future[Value]) -> None:
        """Free the server's thread of ended work. Called in that thread; on the loop if work never
        began."""
        del future
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._next)

    def _next(self) -> None:
        """Give a free thread to the waiting client whose last turn is longest ago."""
        while self._waiting:
            client, turns = next(iter(self._waiting.items()))
            del self._waiting[client]
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind the others
            if not turn.done():  # it is done where its client has left
                turn.set_result(None)
                return
        self._free += 1
