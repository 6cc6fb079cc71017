"""Yield to the event loop between requests, so that new ones are read while answers are written.

A batch ends many requests at once. Handled one after the other they keep the loop for milliseconds,
and new requests wait as long to be refused. With `await pacer.turn()` before each of them the loop
polls its sockets in between. Used by engine.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

LONGEST = 0.0005  # seconds without a pause: below the shortest slice of Linux (0.7 ms x processors)
PAUSE = 1e-6  # seconds asked for; the kernel sleeps about fifty times as long


class LoopPacer:
    """Lets one request proceed per iteration of the event loop. Made on the loop.

    pause: true sleeps PAUSE seconds on the loop, LONGEST seconds after the last sleep, as long as
    requests wait. Needed if the model's threads run under SCHED_IDLE: while the loop never sleeps,
    Linux runs such threads for whole ticks (4 ms); a short sleep lets them run at once.
    """

    def __init__(self, *, pause: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._pause, self._paused = pause, 0.0
        self._waiting = deque[asyncio.Future[None]]()
        self._taken = False  # this iteration of the loop

    async def turn(self) -> None:
        """Wait until the caller has an iteration of the loop; return at once if this is free."""
        if self._taken:
            turn = self._loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                self._sleep()
                turn.set_result(None)
                self._loop.call_soon(self._next)
                return
        self._taken = False

    def _sleep(self) -> None:
        if self._pause and time.monotonic() - self._paused > LONGEST:
            time.sleep(PAUSE)
            self._paused = time.monotonic()
