"""uvicorn's HTTP protocol with bounds that uvicorn has not: on the head of a request, on the time
for all of it to come, on the time for its answer to be read, and on connections (connections.py);
and with refusals that cost no task.

App.refused is asked for a request that came whole in one read, on a connection that has no other
under way; what it gives is written at once, in the turn of the event loop that read the request.
All others are uvicorn's, from their head on. One is asked for at each read, so that many in a row
do not keep the loop from other connections.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .asgi import PLACE, Refused
from .connections import Connections, client_of, seconds_for
from .plain_http import HEAD, refusal, status_line

MARGIN = 1.0  # seconds that the application has to say that a body comes too slowly


@dataclass(frozen=True)
class Bounds:
    """Of all connections. seconds: for a head to come, for a body, and for a client to read."""

    seconds: float
    connections: Connections
    refused: Refused | None


def protocol(bounds: Bounds) -> type[asyncio.Protocol]:
    """A class, as uvicorn takes one."""
    return type("Protocol", (Bounded,), {"bounds": bounds})


class Bounded(HttpToolsProtocol):
    """See the module; to be made by `protocol`."""

    bounds: ClassVar[Bounds]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.owner = client_of(str((self.client or ("",))[0]))
        self._timer: asyncio.TimerHandle | None = None  # of a request that comes
        self._unread: asyncio.TimerHandle | None = None  # of an answer that is not read
        self._in_head, self._whole = True, False  # of the newest request
        self._since, self._bytes = time.monotonic(), 0  # of its head, or of its body
        self._body: list[bytes] | None = None  # the body of one that uvicorn knows nothing of
        self._considered = self._answered = False  # in this read
        if self.bounds.connections.enter(self):
            self._watch()
        else:
            transport.write(refusal(HTTPStatus.SERVICE_UNAVAILABLE))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.connections.leave(self)
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @property
    def waiting(self) -> bool:
        """As of connections.Connection."""
        return self._resting or not self._whole or self.transport.is_closing()

    def drop(self) -> None:
        """As of connections.Connection."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._whole:
            head = self._in_head and len(data) >= HEAD
            self._bytes += len(data.partition(b"\r\n\r\n")[0]) if head else len(data)
            if self._in_head and self._bytes > HEAD:
                self.transport.close()
                return
        self._considered = self._answered = False
        super().data_received(data)
        if self._body is not None:  # the rest of its body is still to come, or never will
            self._pass_on()
        if not self._whole:
            self._watch()
        if self._answered and self._resting:
            self.on_response_complete()  # the time until the next request begins

    def on_message_begin(self) -> None:
        self._in_head, self._whole = True, False
        self._since, self._bytes = time.monotonic(), 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._since, self._bytes = time.monotonic(), 0
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
        self._whole = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._body is not None and not self._refuse(self._body):
            self._pass_on()
        if self._body is None:
            super().on_message_complete()
        self._body = None

    def on_response_complete(self) -> None:
        self.bounds.connections.rest(self)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

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

    def _watch(self) -> None:
        """Close the connection where the rest of a request does not come in time. Most requests
        come in one read and need no timer."""
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(max(self._left(), 0.0), self._close_if_slow)

    def _left(self) -> float:
        """Seconds in which more has to come."""
        seconds = self.bounds.seconds
        if not self._in_head:  # the application has the same limits, and answers
            seconds += MARGIN
        elif self._bytes:
            seconds = seconds_for(self._bytes, seconds)
        return self._since + seconds - time.monotonic()

    def _close_if_slow(self) -> None:
        self._timer = None
        if self._left() > 0:
            self._watch()
        else:
            self.transport.close()

    def _wait_for_reader(self, before: int | None) -> None:
        """Close the connection of a client that reads nothing. before: bytes that it had to read
        at the last look."""
        size = self.transport.get_write_buffer_size()
        if before is not None and size >= before:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(self.bounds.seconds, self._wait_for_reader, size)
