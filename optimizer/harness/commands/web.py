"""Command `web`: serve a bundle's page on this machine.

It listens on 127.0.0.1 only, and serves only files that the manifest lists and the page reads, by
their names in the bundle, after their digests were compared. It writes nothing and receives only
names. The page's policy lets it load from this server alone: no text leaves the browser.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from ..bundle.manifest import AGAIN, read_manifest, refuse_damage
from ..errors import BundleError, MachineError
from ..trust.verify import parse

LOOPBACK = "127.0.0.1"
PAGE = "web/index.html"
INDEX = "web/bundle.json"
WEB = "web/"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".wasm": "application/wasm",
}
HEADERS = {
    # only an isolated page may share memory between wasm threads
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; "
    "worker-src 'self' blob:; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PIECE = 1 << 20  # bytes per read and send
IDLE = 30  # timeout of a silent connection in seconds


def find_pages(folder: Path) -> dict[str, Path]:
    """Return {name: path} of the files of a bundle's web page, to serve them.

    Raises BundleError for a bundle without a page, and for a file that differs from the manifest.
    """
    manifest = read_manifest(folder)
    listed = set(manifest["files"])
    if PAGE not in listed or INDEX not in listed:
        raise BundleError(
            "the bundle has no page for browsers",
            where=str(folder),
            fix="Package it with a target {runtime: onnxruntime-web}.",
        )
    damaged = refuse_damage(folder, manifest)
    names = {n for n in listed if n.startswith(WEB)} | _read_by_the_page(folder)
    wrong = sorted((names & damaged) | (names - listed))
    if wrong:
        raise BundleError(f"damaged or missing: {', '.join(wrong)}", where=str(folder), fix=AGAIN)
    return {name: folder / name for name in names}


def _read_by_the_page(folder: Path) -> set[str]:
    try:
        return set(parse((folder / INDEX).read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BundleError(f"cannot be read ({e})", where=str(folder / INDEX), fix=AGAIN) from None


class PageServer(ThreadingHTTPServer):
    """HTTP server of a bundle's page on 127.0.0.1.

    files: {name: path}, from `find_pages`
    port: port to listen on; 0: a free one

    Raises MachineError for a port in use.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, Path], port: int = 0) -> None:
        self.files = files
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as e:
            raise MachineError(
                str(e.strerror),
                where=f"port {port}",
                fix="Choose another: --port 0 takes a free one.",
            ) from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore, in the server of a bundle's page, connections that a browser closes early."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """Address of the bundle's web page."""
        return f"http://{LOOPBACK}:{self.server_port}/{WEB}"

    @property
    def hosts(self) -> frozenset[str]:
        """Host headers that the server of a bundle's page accepts. A page elsewhere whose name
        resolves to this machine sends its own name (DNS rebinding)."""
        return frozenset(f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost"))


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = IDLE
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "harness", ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._end(HTTPStatus.MISDIRECTED_REQUEST)
            return
        name = unquote(urlsplit(self.path).path).removeprefix("/")
        if name in ("", WEB.rstrip("/")):
            self._end(HTTPStatus.FOUND, {"Location": f"/{WEB}"})
            return
        path = self.server.files.get(PAGE if name == WEB else name)
        if path is None:
            self._end(HTTPStatus.NOT_FOUND)
            return
        kind = TYPES.get(PurePosixPath(path.name).suffix, "application/octet-stream")
        with path.open("rb") as file:
            size = path.stat().st_size
            self._end(HTTPStatus.OK, {"Content-Type": kind, "Content-Length": str(size)})
            while body and (piece := file.read(PIECE)):
                self.wfile.write(piece)

    def _end(self, status: HTTPStatus, headers: Mapping[str, str] | None = None) -> None:
        """Send status and headers of an HTTP response of the web page's server; errors have no
        body."""
        self.send_response(status)
        for name, value in {"Content-Length": "0", **HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing in the command `web`: standard error is for errors."""
