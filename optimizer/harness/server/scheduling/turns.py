"""What an answer takes of the event loop, one piece per turn of it.

A batch ends many requests at once, and as many new ones are read then. Done one after the other
they keep the loop for milliseconds, and whoever is to be refused waits for that long. With `await
turn()` before each piece the loop looks between two of them for what came.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

LONGEST = 0.0005  # seconds without a pause: less than the shortest slice that Linux gives a thread,
# 0.7 ms, as multiplied with the processors' number
PAUSE = 1e-6  # seconds; the kernel makes some fifty of one


class Turns:
    """Made on the event loop.

    pause: sleep for an instant before LONGEST has gone by, while pieces wait. For a model whose
    threads run when nothing else wants a processor (SCHED_IDLE): they too have a small share, and
    to a loop that never sleeps the kernel's scheduler (EEVDF) lets them have it as a whole tick, 4
    ms as a rule. In the pause they get what they are owed.
    """

    def __init__(self, *, pause: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._pause, self._paused = pause, 0.0
        self._waiting = deque[asyncio.Future[None]]()
        self._taken = False  # this turn is

    async def turn(self) -> None:
        """Wait until no other has this turn of the loop; for nothing where no other wants it."""
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
            if not turn.done():  # as when its client has gone
                self._rest()
                turn.set_result(None)
                self._loop.call_soon(self._next)
                return
        self._taken = False

    def _rest(self) -> None:
        if self._pause and time.monotonic() - self._paused > LONGEST:
            time.sleep(PAUSE)
            self._paused = time.monotonic()
