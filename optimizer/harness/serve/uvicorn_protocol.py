"""uvicorn's HTTP protocol with a bound on the head of a request, and on the time for it, which
uvicorn has not; and with refusals that cost no task.

App.refused is asked for a request that came whole in one read, on a connection that has no other
under way; what it gives is written at once, in the turn of the event loop that read the request.
All others are uvicorn's, from their head on. One is asked for at each read, so that many in a row
do not keep the loop from other connections.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .asgi import PLACE, Refused
from .plain_http import HEAD, status_line


def protocol(seconds: float, refused: Refused | None = None) -> type[asyncio.Protocol]:
    """For heads that come within `seconds`, and requests that `refused` may refuse."""
    return type("Protocol", (Bounded,), {"bounds": Bounds(seconds, refused)})


@dataclass(frozen=True)
class Bounds:
    """Of all connections. head_seconds: for a head to come."""

    head_seconds: float
    refused: Refused | None


class Bounded(HttpToolsProtocol):
    """See the module; to be made by `protocol`, as uvicorn takes a class."""

    bounds: ClassVar[Bounds]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_bytes, self._in_head = 0, True
        self._patience: asyncio.TimerHandle | None = None
        self._wait_for_head()
        self._body: list[bytes] | None = None  # the body of one that uvicorn knows nothing of
        self._considered = self._answered = False  # in this read

    def connection_lost(self, exc: Exception | None) -> None:
        self._come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += (
                len(data) if len(data) < HEAD else len(data.partition(b"\r\n\r\n")[0])
            )
            if self._head_bytes > HEAD:
                self.transport.close()
                return
        self._considered = self._answered = False
        super().data_received(data)
        if self._in_head:
            self._wait_for_head()
        if self._body is not None:  # the rest of its body is still to come, or never will
            self._pass_on()
        if self._answered and self._resting:
            self.on_response_complete()  # the time until the next request begins

    def on_message_begin(self) -> None:
        self._come()  # the time for the one before it
        self._head_bytes, self._in_head = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._come()
        if self._may_be_refused():
            self._body = []
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._body is not None:
            self._body.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._body is not None and not self._refuse(self._body):
            self._pass_on()
        if self._body is None:
            super().on_message_complete()
        self._body = None

    @property
    def _resting(self) -> bool:
        """Whether no request of this connection is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _may_be_refused(self) -> bool:
        """Whether it is one that `refused` may know, with nothing about it that uvicorn is to
        see to."""
        return (
            self.bounds.refused is not None
            and not self._considered
            and self._resting
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
            and not self.flow.write_paused  # by a client that reads no answers
            and max(len(self.connections), len(self.tasks)) < (self.limit_concurrency or 0)
        )

    def _refuse(self, body: list[bytes]) -> bool:
        """Whether the request was refused."""
        assert self.bounds.refused is not None
        self._considered = True
        path = self.url.partition(b"?")[0].decode("latin-1")
        self.scope |= {"method": "POST", "path": path}  # uvicorn writes them anew
        response = self.bounds.refused(self.scope, sum(map(len, body)))
        if response is None:
            return False
        lines = [status_line(response.status), *(b"%b: %b" % p for p in response.pairs())]
        self.transport.write(b"\r\n".join([*lines, b"", response.body]))
        self._answered = True
        return True

    def _pass_on(self) -> None:
        """Let uvicorn have what was held of a request."""
        body, self._body = self._body or [], None
        try:
            super().on_headers_complete()
        except BaseException:  # a URL that uvicorn does not read: no task, which would close it
            if (place := self.scope.get(PLACE)) is not None:
                place.close()
            raise
        for part in body:
            super().on_body(part)

    def _wait_for_head(self) -> None:
        """From its first byte on: most heads come in one read and need no timer."""
        if self._patience is None:
            self._patience = self.loop.call_later(self.bounds.head_seconds, self._close_if_slow)

    def _come(self) -> None:
        """The head has come, or nothing more will."""
        self._in_head = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _close_if_slow(self) -> None:
        if self._in_head:
            self.transport.close()
