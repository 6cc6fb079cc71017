"""The same by uvicorn, which is faster: httptools parses, uvloop waits."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

from .asgi import Refused
from .connections import Connections
from .listening import addresses, listening
from .plain_http import Application


def installed() -> bool:
    return all(find_spec(name) for name in ("uvicorn", "httptools"))


class Server:
    """As plain_http.Server. refused: see uvicorn_protocol.py."""

    def __init__(
        self,
        app: Application,
        seconds: float,
        most: int,
        of_client: int,
        refused: Refused | None = None,
    ) -> None:
        import uvicorn

        from .uvicorn_protocol import Bounds, protocol

        config = uvicorn.Config(
            app,
            http=protocol(Bounds(seconds, Connections(most, of_client), refused)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application logs what happens, as JSON
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(seconds),
        )
        config.load()
        self._config, self._server = config, uvicorn.Server(config)
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """As plain_http.Server."""
        self._server.lifespan = self._config.lifespan_class(self._config)
        sockets = listening(addresses(host, port))  # uvicorn's own ends the process, without a word
        await self._server.startup(sockets)
        self.port = sockets[0].getsockname()[1]
        self._loop = asyncio.create_task(self._server.main_loop())

    async def close(self) -> None:
        self._server.should_exit = True
        await self._loop
        await self._server.shutdown()
