"""Bundle as an ASGI 3 application, for another server such as Ray Serve.

    Application(Path("bundle"), ["--rows", "16"])

It answers over HTTP as serve.py does, with the same options except those of listening. On startup
(lifespan protocol) it opens the bundle and warms it up; on shutdown it answers all accepted
requests. https://asgi.readthedocs.io/en/latest/specs/lifespan.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starlette.types import Receive, Scope, Send

from ..errors import HarnessError
from ..server.versions.loader import BundleLoader
from .command_line import parse_arguments
from .opening import make_opener
from .serve import application, choose_hosts, say


class Application:
    """ASGI 3 application that serves one bundle, for another server such as Ray Serve.

    folder: folder of the bundle
    options: options of `serve`, except those of listening

    Raises InputError for options that `serve` does not accept.
    """

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        args = parse_arguments(["serve", "--bundle", str(folder), *options])
        self._app, self._tracer = application(args, choose_hosts(args, loopback=False))
        self._loader = BundleLoader(make_opener(args, _warn), args, self._app.versions, say)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app(scope, receive, send)

    def check_health(self) -> None:
        """Raise RuntimeError if the bundle is not ready, so that no request would be answered."""
        if not self._app.versions.ready:
            raise RuntimeError("the bundle is not ready")

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._loader.start()
        except (HarnessError, OSError) as e:
            await self._loader.close()
            await send({"type": "lifespan.startup.failed", "message": str(e)})
            return
        self._app.load = self._loader.load
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._app.versions.wait_until_drained()
        await self._loader.close()
        if self._tracer is not None:
            self._tracer.close()
        await send({"type": "lifespan.shutdown.complete"})


def _warn(message: str) -> None:
    say(level="warning", event="opening", message=message)
