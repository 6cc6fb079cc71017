"""Serve Google Cloud Storage's XML API in this process, as far as obstore uses it: objects with
generations, conditional writes, uploads in parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

import pytest

from tests.publish.servers.loopback import QuietHandler, answering, url

BUCKET = "releases"
Answer = tuple[int, bytes, dict[str, str]]


class Server(ThreadingHTTPServer):
    """objects {name: (generation, bytes)}; uploads {id: {part number: bytes}}."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.generation = 1000
        self.lock = Lock()


class Handler(QuietHandler):
    server: Server

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, name = unquote(url.path).lstrip("/").partition("/")
        with self.server.lock:
            answer = self.answer_to(name, query, body) if bucket == BUCKET else NO_BUCKET
        status, data, headers = answer
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do

    def answer_to(self, name: str, query: dict[str, str], body: bytes) -> Answer:
        if not name:
            return self.listed(query["prefix"])
        if "uploads" in query or "uploadId" in query:
            return self.upload(name, query, body)
        if self.command == "PUT":
            return self.write(name, body)
        if name not in self.server.objects:
            return problem(404, "NoSuchKey")
        if self.command == "DELETE":
            del self.server.objects[name]
            return 204, b"", {}
        generation, data = self.server.objects[name]
        headers = described(generation, data)
        if part := self.headers.get("Range"):
            start, end = map(int, part.removeprefix("bytes=").split("-"))
            if start >= len(data):
                return problem(416, "InvalidRange")
            last = min(end, len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
            return 206, data[start : last + 1], headers
        return 200, data, headers

    def write(self, name: str, body: bytes) -> Answer:
        current = self.server.objects.get(name, (0, b""))[0]
        if int(self.headers.get("x-goog-if-generation-match", current)) != current:
            return problem(412, "PreconditionFailed")
        self.server.generation += 1
        self.server.objects[name] = self.server.generation, body
        return 200, b"", described(self.server.generation, body)

    def upload(self, name: str, query: dict[str, str], body: bytes) -> Answer:
        uploads = self.server.uploads
        if "uploads" in query:
            upload = f"upload-{len(uploads)}"
            uploads[upload] = {}
            inner = f"<Bucket>{BUCKET}</Bucket><Key>{name}</Key><UploadId>{upload}</UploadId>"
            return 200, xml("InitiateMultipartUploadResult", inner), {}
        upload = query["uploadId"]
        if self.command == "PUT":
            uploads[upload][int(query["partNumber"])] = body
            return 200, b"", described(1, body)
        parts = uploads.pop(upload)
        if self.command == "DELETE":
            return 204, b"", {}
        elements = ElementTree.fromstring(body).iter()
        numbers = [int(str(e.text)) for e in elements if e.tag.endswith("PartNumber")]
        status, _, headers = self.write(name, b"".join(parts[n] for n in numbers))
        inner = f"<ETag>{headers['ETag']}</ETag>"
        return status, xml("CompleteMultipartUploadResult", inner), headers

    def listed(self, prefix: str) -> Answer:
        inner = "".join(
            f"<Contents><Key>{name}</Key><Size>{len(data)}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, (_, data) in self.server.objects.items()
            if name.startswith(prefix)
        )
        return 200, xml("ListBucketResult", inner), {}


def xml(name: str, inner: str) -> bytes:
    return f'<?xml version="1.0"?><{name}>{inner}</{name}>'.encode()


def problem(status: int, code: str) -> Answer:
    return status, xml("Error", f"<Code>{code}</Code>"), {}


NO_BUCKET = problem(404, "NoSuchBucket")


def described(generation: int, data: bytes) -> dict[str, str]:
    return {
        "ETag": f'"{hashlib.md5(data).hexdigest()}"',
        "x-goog-generation": str(generation),
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
    }


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    account = {"gcs_base_url": url(server), "disable_oauth": True}
    with answering(server), pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            json.dumps({**account, "client_email": "", "private_key": "", "private_key_id": ""}),
        )
        yield server
