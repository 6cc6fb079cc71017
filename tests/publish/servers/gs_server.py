"""Google Cloud Storage in this process, in so far as it is asked of it: the JSON API's objects with
their generations, preconditions of uploads, and resumable uploads."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.publish.servers.loopback import QuietHandler, answering, url

BUCKET = "releases"


class Server(ThreadingHTTPServer):
    """objects {name: (generation, bytes)}; uploads {name: bytes so far}."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.uploads: dict[str, bytes] = {}
        self.generation = 1000
        self.lock = Lock()


class Handler(QuietHandler):
    server: Server

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        with self.server.lock:
            status, data, headers = self.answer_to(url.path, query, body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do

    def answer_to(
        self, path: str, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        objects = self.server.objects
        if f"/b/{BUCKET}/o" not in path:
            return 404, b"", {}
        if path.startswith("/upload"):
            return self.upload(query, body)
        name = unquote(path.partition("/o/")[2])
        if not name:
            named = {n: o for n, o in objects.items() if n.startswith(query["prefix"])}
            return (
                200,
                json.dumps({"items": [described(n, *o) for n, o in named.items()]}).encode(),
                {},
            )
        if name not in objects:
            return 404, b"", {}
        if self.command == "DELETE":
            del objects[name]
            return 204, b"", {}
        generation, data = objects[name]
        if query.get("alt") != "media":
            return 200, json.dumps(described(name, generation, data)).encode(), {}
        if int(query.get("generation", generation)) != generation:
            return 404, b"", {}
        if part := self.headers.get("Range"):
            start, end = map(int, part.removeprefix("bytes=").split("-"))
            return (206, data[start : end + 1], {}) if start < len(data) else (416, b"", {})
        return 200, data, {}

    def upload(self, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        kind, name = query["uploadType"], query.get("name", "")
        if kind == "resumable" and not self.headers.get("Content-Range"):
            self.server.uploads[name] = b""
            host = f"http://127.0.0.1:{self.server.server_address[1]}{self.path}"
            return 200, b"", {"Location": host}
        if kind == "resumable":
            self.server.uploads[name] += body
            whole = int(self.headers["Content-Range"].rpartition("/")[2])
            sent = len(self.server.uploads[name])
            if sent < whole:
                return 308, b"", {"Range": f"bytes=0-{sent - 1}"}
            body = self.server.uploads.pop(name)
        if kind == "multipart":
            _, first, second = body.split(b"\n--==0==\n")[0:1] + body.split(b"\n\n", 2)[1:]
            name = json.loads(first.split(b"\n--==0==")[0])["name"]
            body = second.removesuffix(b"\n--==0==--")
        current = self.server.objects.get(name, (0, b""))[0]
        if int(query.get("ifGenerationMatch", current)) != current:
            return 412, b"{}", {}
        self.server.generation += 1
        self.server.objects[name] = self.server.generation, body
        return 200, json.dumps(described(name, *self.server.objects[name])).encode(), {}


def described(name: str, generation: int, data: bytes) -> dict[str, str]:
    md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
    return {"name": name, "generation": str(generation), "size": str(len(data)), "md5Hash": md5}


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    with answering(server), pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url(server))
        yield server
