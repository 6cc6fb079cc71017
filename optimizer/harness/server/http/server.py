"""Serve an ASGI application over HTTP/1.1 with uvicorn and h11, within limits that uvicorn lacks.

Protocol limits the time to receive a head and a body, the time to read an answer, and connections
(connections.py). h11 limits the bytes of a head. Used by harness/commands/serve.py.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .connections import Connections, client_of, seconds_for
from .listening import open_sockets, resolve_addresses

HEAD = 32 << 10  # bytes of a request line and its headers
PART = 256 << 10  # bytes of an answer that a client reads within `seconds`
MARGIN = 1.0  # seconds for the application to answer 408 to a slow body, before the connection ends
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of every connection of a server.

    seconds: maximum seconds to receive a head, to receive a body, and to read PART bytes of an
        answer
    connections: open connections of the server, see connections.py
    """

    seconds: float
    connections: Connections


class Protocol(H11Protocol):
    """One HTTP connection of the server. HttpServer makes a subclass with its bounds."""

    bounds: ClassVar[ConnectionLimits]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.owner = client_of(str((self.client or ("",))[0]))
        self._phase: object = None  # the head or body that is being received
        self._since = 0.0  # time at which that began
        self._timer: asyncio.TimerHandle | None = None  # for the head or body
        self._unread: asyncio.TimerHandle | None = None  # for an answer that is not read
        if self.bounds.connections.enter(self):
            self._watch()
        else:
            transport.write(REFUSAL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.connections.leave(self)
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @property
    def waiting(self) -> bool:
        """False while a complete HTTP request is answered, so that the connection must stay open
        (connections.Connection)."""
        resting = self.cycle is None or self.cycle.response_complete
        return resting or self.conn.their_state is h11.SEND_BODY or self.transport.is_closing()

    def drop(self) -> None:
        """Close the client's HTTP connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), HEAD):  # h11 limits a head by what is left incomplete
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + HEAD])
        self._watch()

    def on_response_complete(self) -> None:
        self.bounds.connections.start_waiting(self)
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _watch(self) -> None:
        """Set the timer for the request's head or body that is being received.

        uvicorn has a timer only for the time between two requests.
        """
        state = self.conn.their_state
        begun = state is h11.IDLE and bool(self.conn.trailing_data[0])
        first = state is h11.IDLE and self.cycle is None
        receiving = begun or first or state is h11.SEND_BODY
        phase = (id(self.cycle), state, begun) if receiving else None
        if phase == self._phase:
            return
        self._phase, self._since = phase, time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if phase is not None:
            self._timer = self.loop.call_later(self._left(), self._close_if_slow)

    def _left(self) -> float:
        """Return the seconds until a client's connection is closed if no more of its head or body
        arrives."""
        seconds, size = self.bounds.seconds, 0
        if self.conn.their_state is h11.SEND_BODY:  # the application has the same limit
            seconds += MARGIN
        else:
            size = len(self.conn.trailing_data[0])
        if size:
            seconds = seconds_for(size, seconds)
        return max(self._since + seconds - time.monotonic(), 0.0)

    def _close_if_slow(self) -> None:
        left = self._left()
        if left > 0:
            self._timer = self.loop.call_later(left, self._close_if_slow)
        else:
            self.transport.close()

    def _await_reader(self, before: int | None) -> None:
        """Close the connection if its client reads the answer too slowly.

        before: unread bytes at the previous check, `seconds` ago; None at the first check
        """
        size = self.transport.get_write_buffer_size()
        if before is not None and size > before - PART:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(self.bounds.seconds, self._await_reader, size)


class HttpServer:
    """HTTP server of an ASGI application.

    seconds: maximum seconds to receive a request, to read a part of the answer, and between two
        requests of a connection
    most: maximum connections
    of_client: maximum connections of one client
    """

    def __init__(self, app: Any, seconds: float, most: int, of_client: int) -> None:
        bounds = ConnectionLimits(seconds, Connections(most, of_client))
        config = uvicorn.Config(
            app,
            interface="asgi3",
            http=type("BoundedProtocol", (Protocol,), {"bounds": bounds}),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application logs what happens, as JSON
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEAD,
            timeout_keep_alive=max(1, int(seconds)),
        )
        config.load()
        self._config, self._server = config, uvicorn.Server(config)
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen for HTTP on an address; `port` of the server is then the port, a free one for 0.

        Raises InputError, MachineError.
        """
        self._server.lifespan = self._config.lifespan_class(self._config)
        sockets = open_sockets(
            resolve_addresses(host, port)
        )  # uvicorn's own ends the process without a word
        await self._server.startup(sockets)
        self.port = sockets[0].getsockname()[1]
        self._loop = asyncio.create_task(self._server.main_loop())

    async def close(self) -> None:
        """Accept no more HTTP connections, let running requests end, and close the connections."""
        self._server.should_exit = True
        await self._loop
        await self._server.shutdown()
