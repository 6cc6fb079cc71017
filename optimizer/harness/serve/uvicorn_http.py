"""The same by uvicorn, which is faster: httptools parses, uvloop waits."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import Any

from .plain_http import HEAD, Application


def installed() -> bool:
    return all(find_spec(name) for name in ("uvicorn", "httptools"))


def protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with a bound on the head of a request, and on the time for it, which
    uvicorn has not."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Bounded(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_bytes, self._in_head = 0, True
            self._patience = self.loop.call_later(seconds, self._close_if_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._patience.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += (
                    len(data) if len(data) < HEAD else len(data.partition(b"\r\n\r\n")[0])
                )
                if self._head_bytes > HEAD:
                    self.transport.close()
                    return
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._head_bytes, self._in_head = 0, True
            self._patience.cancel()
            self._patience = self.loop.call_later(seconds, self._close_if_slow)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._patience.cancel()
            super().on_headers_complete()

        def _close_if_slow(self) -> None:
            if self._in_head:
                self.transport.close()

    return Bounded


class Server:
    """As plain_http.Server."""

    def __init__(self, app: Application, seconds: float, most: int) -> None:
        import uvicorn

        config = uvicorn.Config(
            app,
            http=protocol(seconds),
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
