"""Serve the part of the OCI distribution specification that the tests use, in this process.

The server checks the digest of an upload, and that a manifest's blobs exist. Its attributes hold
its content, its log, and its behaviour: a referrers API, Basic or token authorization, redirects of
blobs to another host.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from optimizer.publish.registries.credentials import read_basic
from optimizer.publish.registries.registry import Registry
from optimizer.publish.registries.transport import Transport
from tests.publish.servers.loopback import QuietHandler, answering

USER, PASSWORD, TOKEN = "user", "secret-password", "the-token"


class Server(ThreadingHTTPServer):
    """blobs {digest: bytes}; manifests {digest or tag: (media type, bytes)}; log: (method, path,
    bytes received, header Authorization)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.log: list[tuple[str, str, int, str]] = []
        self.has_referrers = False
        self.authorization = ""  # "Basic" or "Bearer"
        self.realm: str | None = None  # of the token service; None: this server's own
        self.link = ""  # header of lists with the URL of the next page
        self.location: str | None = None  # of an upload
        self.drip = 0.0  # seconds between two bytes of a blob
        self.blobs_at = ""  # base address of another server that has the blobs
        self.ranges = True
        self.cut: int | None = None  # bytes after which one answer with a blob ends
        self.failures = 0  # number of answers to come that are 503
        self.clients: list[Registry] = []

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def client(self, docker: Path = Path("/nonexistent")) -> Registry:
        """Return a client of the repository models/tiny; the server's end closes it."""
        transport = Transport(self.host, partial(read_basic, docker, self.host))
        self.clients.append(Registry(transport, "models/tiny"))
        return self.clients[-1]


class Handler(QuietHandler):
    server: Server

    def do(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        authorization = self.headers.get("Authorization", "")
        self.server.log.append((self.command, self.path, length, authorization))
        path = urlsplit(self.path).path
        if self.server.failures:
            self.server.failures -= 1
            return self.answer(503)
        if path == "/token":
            return self.token(authorization)
        if not self.allowed(authorization):
            return None
        for pattern, handle in (
            (r"/v2/.+/blobs/uploads/(.*)", self.upload),
            (r"/v2/.+/blobs/(sha256:.+)", self.blob),
            (r"/v2/.+/manifests/(.+)", self.manifest),
            (r"/v2/.+/referrers/(.+)", self.referrers),
            (r"/v2/.+/tags/(list)", self.tags),
        ):
            if match := re.fullmatch(pattern, path):
                return handle(match[1], body)
        return self.answer(404)

    do_GET = do_HEAD = do_PUT = do_POST = do

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def error(self, status: int, code: str) -> None:
        document = {"errors": [{"code": code, "message": "the reason"}]}
        self.answer(status, json.dumps(document).encode())

    def allowed(self, authorization: str) -> bool:
        kind = self.server.authorization
        pair = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        expected = {"": authorization, "Basic": f"Basic {pair}", "Bearer": f"Bearer {TOKEN}"}[kind]
        if authorization == expected:
            return True
        realm = self.server.realm
        realm = f"http://{self.server.host}/token" if realm is None else realm
        fields = f'realm="{realm}",service="s",scope="repository:x:pull"'
        self.answer(401, WWW_Authenticate=f"{kind} {fields}")
        return False

    def token(self, authorization: str) -> None:
        pair = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if authorization != f"Basic {pair}":
            return self.error(401, "UNAUTHORIZED")
        return self.answer(200, json.dumps({"token": TOKEN}).encode())

    def upload(self, _: str, body: bytes) -> None:
        if self.command == "POST":
            own = f"{urlsplit(self.path).path}1?state=x"
            return self.answer(202, Location=self.server.location or own)
        (digest,) = parse_qs(urlsplit(self.path).query)["digest"]
        if digest != f"sha256:{hashlib.sha256(body).hexdigest()}":
            return self.error(400, "DIGEST_INVALID")
        self.server.blobs[digest] = body
        return self.answer(201)

    def blob(self, digest: str, _: bytes) -> None:
        data = self.server.blobs.get(digest)
        if data is None:
            return self.error(404, "BLOB_UNKNOWN")
        if self.server.blobs_at and self.command == "GET":
            return self.answer(307, Location=f"{self.server.blobs_at}{self.path}")
        status = 200
        if (part := self.headers.get("Range")) and self.server.ranges:
            data, status = data[int(part.removeprefix("bytes=").rstrip("-")) :], 206
        if self.server.drip and self.command == "GET":
            return self.dripped(data)
        cut, self.server.cut = self.server.cut, None
        if cut is None or self.command == "HEAD":
            self.server.cut = cut
            return self.answer(status, data)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:cut])
        self.close_connection = True
        return None

    def dripped(self, data: bytes) -> None:
        """Send half of a blob, and then a byte now and then."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.close_connection = True
        with suppress(OSError):  # until the client closes the connection
            for i in range(len(data) // 2, len(data)):
                time.sleep(self.server.drip)
                self.wfile.write(data[i : i + 1])

    def manifest(self, reference: str, body: bytes) -> None:
        manifests = self.server.manifests
        if self.command != "PUT":
            if reference not in manifests:
                return self.error(404, "MANIFEST_UNKNOWN")
            kind, data = manifests[reference]
            return self.answer(200, data, Content_Type=kind)
        document = json.loads(body)
        named = [*document.get("layers", []), *filter(None, [document.get("config")])]
        if any(entry["digest"] not in self.server.blobs for entry in named):
            return self.error(400, "MANIFEST_BLOB_UNKNOWN")
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if reference.startswith("sha256:") and reference != digest:
            return self.error(400, "DIGEST_INVALID")
        kind = self.headers["Content-Type"]
        assert kind == document["mediaType"]
        manifests[digest] = manifests[reference] = (kind, body)
        subject = document.get("subject")
        if subject and self.server.has_referrers:
            return self.answer(201, OCI_Subject=subject["digest"])
        return self.answer(201)

    def referrers(self, subject: str, _: bytes) -> None:
        if not self.server.has_referrers:
            return self.answer(404)
        listed = []
        for digest, (kind, data) in self.server.manifests.items():
            document = json.loads(data)
            if (
                digest.startswith("sha256:")
                and document.get("subject", {}).get("digest") == subject
            ):
                entry = {"mediaType": kind, "digest": digest, "size": len(data)}
                listed.append({**entry, "artifactType": document["artifactType"]})
        index = {"schemaVersion": 2, "manifests": listed}
        return self.page(index)

    def tags(self, *_: Any) -> None:
        tags = [tag for tag in self.server.manifests if ":" not in tag]
        self.page({"name": "x", "tags": tags})

    def page(self, listed: dict[str, Any]) -> None:
        more = {"Link": self.server.link.format(len(self.server.log))} if self.server.link else {}
        self.answer(200, json.dumps(listed).encode(), **more)


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    with answering(server):
        try:
            yield server
        finally:
            for client in server.clients:
                client.close()
