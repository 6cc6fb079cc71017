"""The same by uvicorn, which is faster: httptools parses, uvloop waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from .asgi import Response, Scope
from .plain_http import HEAD, Application, status_line

Refused = Callable[[Scope, int], Response | None]


def installed() -> bool:
    return all(find_spec(name) for name in ("uvicorn", "httptools"))


def protocol(seconds: float, refused: Refused | None = None) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with a bound on the head of a request, and on the time for it, which
    uvicorn has not.

    refused: as App.refused. It is asked for a request that came whole in one read, on a connection
    that has no other under way; what it gives is written at once, in the turn of the event loop
    that read the request. All others are uvicorn's, from their head on. One is asked for at each
    read, so that many in a row do not keep the loop from other connections.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Bounded(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_bytes, self._in_head = 0, True
            self._patience: asyncio.TimerHandle | None = None
            self._wait_for_head()
            self._held: list[bytes] | None = None  # the body of one that uvicorn knows nothing of
            self._asked = self._answered = False  # in this read

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
            self._asked = self._answered = False
            super().data_received(data)
            if self._in_head:
                self._wait_for_head()
            if self._held is not None:  # the rest of its body is still to come, or never will
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
                self._held = []
            else:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if self._held is not None:
                self._held.append(body)
            else:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if self._held is not None and not self._refuse(self._held):
                self._pass_on()
            if self._held is None:
                super().on_message_complete()
            self._held = None

        @property
        def _resting(self) -> bool:
            """Whether no request of this connection is under way."""
            return self.cycle is None or self.cycle.response_complete

        def _may_be_refused(self) -> bool:
            """Whether it is one that `refused` may know, with nothing about it that uvicorn is to
            see to."""
            return (
                refused is not None
                and not self._asked
                and self._resting
                and self.parser.get_method() == b"POST"
                and self.parser.get_http_version() == "1.1"
                and self.parser.should_keep_alive()
                and not self.parser.should_upgrade()
                and not self.flow.write_paused  # by a client that reads no answers
                and len(self.connections) < (self.limit_concurrency or 0)
            )

        def _refuse(self, body: list[bytes]) -> bool:
            """Whether the request was refused."""
            assert refused is not None
            self._asked = True
            path = self.url.partition(b"?")[0].decode("latin-1")
            scope = {**self.scope, "method": "POST", "path": path}
            response = refused(scope, sum(map(len, body)))
            if response is None:
                return False
            lines = [status_line(response.status), *(b"%b: %b" % p for p in response.pairs())]
            self.transport.write(b"\r\n".join([*lines, b"", response.body]))
            self._answered = True
            return True

        def _pass_on(self) -> None:
            """Let uvicorn have what was held of a request."""
            held, self._held = self._held or [], None
            super().on_headers_complete()
            for body in held:
                super().on_body(body)

        def _wait_for_head(self) -> None:
            """From its first byte on: most heads come in one read and need no timer."""
            if self._patience is None:
                self._patience = self.loop.call_later(seconds, self._close_if_slow)

        def _come(self) -> None:
            """The head has come, or nothing more will."""
            self._in_head = False
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

        def _close_if_slow(self) -> None:
            if self._in_head:
                self.transport.close()

    return Bounded


class Server:
    """As plain_http.Server. refused: see `protocol`."""

    def __init__(
        self, app: Application, seconds: float, most: int, refused: Refused | None = None
    ) -> None:
        import uvicorn

        config = uvicorn.Config(
            app,
            http=protocol(seconds, refused),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application logs what happens, as JSON
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=most,
            timeout_keep_alive=int(seconds),
        )
        config.load()
        self._config, self._server = config, uvicorn.Server(config)
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        self._server.lifespan = self._config.lifespan_class(self._config)
        self._config.host, self._config.port = host, port
        await self._server.startup()
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self._loop = asyncio.create_task(self._server.main_loop())

    async def close(self) -> None:
        self._server.should_exit = True
        await self._loop
        await self._server.shutdown()
