"""Serve the part of S3 that the tests use, in this process: objects of one bucket, conditional
writes, uploads in parts. The server checks conditions and the SHA-256 of each upload.

Its attributes hold its content, its log, and its behaviour: ignoring conditions, failing, or
killing a client at one of its requests.
"""

from __future__ import annotations

import base64
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from importlib.util import find_spec
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

import pytest

from optimizer.foundation.buckets.objects import BucketObjects
from optimizer.publish.registries.object_store import ObjectStore
from tests.publish.servers.loopback import QuietHandler, answering, url

KIND = pytest.param(
    "s3",
    marks=pytest.mark.skipif(
        find_spec("obstore") is None, reason="pip install 'optimize-toolchain[s3]'"
    ),
)
BUCKET, SECRET = "releases", "the-secret-key"
NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class Server(ThreadingHTTPServer):
    """objects {key: bytes}; log: (method, key, query, bytes received)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.log: list[tuple[str, str, str, int]] = []
        self.blind = False  # ignores the conditions of writes
        self.failures = 0  # number of answers to come that are 503
        self.silent = 0  # number of writes to come that are done, but answered with 500
        self.lock = Lock()
        self.victim = 0  # a process id, killed at its request number `kill_at`: before or after
        self.kill_at, self.kill_after = -1, False
        self.clients: list[ObjectStore] = []

    def client(self, **options: Any) -> ObjectStore:
        """Return a store below the prefix models/tiny."""
        if options or not self.clients:
            self.clients.append(ObjectStore(BucketObjects("s3", BUCKET, "models/tiny", **options)))
        return ObjectStore(self.clients[-1].objects)  # a connection costs more than a publish

    def sent(self) -> list[str]:
        """Return the keys of the objects that were written, in order."""
        return [key for method, key, _, _ in self.log if method == "PUT"]


class Handler(QuietHandler):
    server: Server

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        server = self.server
        with server.lock:
            server.log.append((self.command, key, url.query, len(body)))
            server.kill_at -= 1
            killed = server.kill_at == -1 and server.victim
            if killed and not server.kill_after:
                return self.kill()
            if SECRET in str(self.headers) or bucket != BUCKET:
                return self.error(404, "NoSuchBucket")
            if server.failures:
                server.failures -= 1
                return self.error(503, "SlowDown")
            answer = self.answer_to(key, query, body)
        if killed:
            return self.kill()
        return self.reply(*answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do

    def kill(self) -> None:
        os.kill(self.server.victim, signal.SIGKILL)
        self.close_connection = True

    def answer_to(self, key: str, query: dict[str, str], body: bytes) -> tuple[Any, ...]:
        if self.command == "POST":
            return self.post(key, query, body)
        if self.command == "DELETE":
            self.server.uploads.pop(query["uploadId"], None)
            return 204, b"", {}
        if self.command == "PUT":
            return self.put(key, query, body)
        if "list-type" in query:
            return self.listed(query)
        return self.get(key)

    def get(self, key: str) -> tuple[Any, ...]:
        data = self.server.objects.get(key)
        if data is None:
            return self.problem(404, "NoSuchKey")
        headers = {"ETag": etag(data), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if part := self.headers.get("Range"):
            start, end = map(int, part.removeprefix("bytes=").split("-"))
            if start >= len(data):
                return self.problem(416, "InvalidRange")
            last = min(end, len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
            return 206, data[start : end + 1], headers
        return 200, data, headers

    def put(self, key: str, query: dict[str, str], body: bytes) -> tuple[Any, ...]:
        if self.headers.get("x-amz-checksum-sha256", checksum(body)) != checksum(body):
            return self.problem(400, "BadDigest")
        if "uploadId" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, b"", {"ETag": etag(body)}
        old = self.server.objects.get(key)
        if not self.server.blind:
            match = self.headers.get("If-Match")
            if match is not None and old is None:
                return self.problem(404, "NoSuchKey")
            if (match is not None and old is not None and match != etag(old)) or (
                self.headers.get("If-None-Match") == "*" and old is not None
            ):
                return self.problem(412, "PreconditionFailed")
        self.server.objects[key] = body
        if self.server.silent and key.endswith("index.json"):
            self.server.silent -= 1
            return self.problem(500, "InternalError")
        return 200, b"", {"ETag": etag(body)}

    def post(self, key: str, query: dict[str, str], body: bytes) -> tuple[Any, ...]:
        if "uploads" in query:
            upload = f"upload-{len(self.server.log)}"
            self.server.uploads[upload] = {}
            inner = f"<UploadId>{upload}</UploadId>"
            return 200, xml("InitiateMultipartUploadResult", inner), {}
        if "delete" in query:
            elements = ElementTree.fromstring(body).iter()
            keys = [str(e.text) for e in elements if e.tag.endswith("Key")]
            for deleted in keys:
                self.server.objects.pop(deleted, None)
            inner = "".join(f"<Deleted><Key>{k}</Key></Deleted>" for k in keys)
            return 200, xml("DeleteResult", inner), {}
        parts = self.server.uploads.pop(query["uploadId"], None)
        if parts is None:
            return self.problem(404, "NoSuchUpload")
        self.server.objects[key] = b"".join(data for _, data in sorted(parts.items()))
        return 200, xml("CompleteMultipartUploadResult", "<ETag>x</ETag>"), {}

    def listed(self, query: dict[str, str]) -> tuple[Any, ...]:
        """List ten objects per page."""
        keys = sorted(k for k in self.server.objects if k.startswith(query["prefix"]))
        start = int(query.get("continuation-token", 0))
        inner = "".join(
            f"<Contents><Key>{k}</Key><Size>{len(self.server.objects[k])}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for k in keys[start : start + 10]
        )
        more = start + 10 < len(keys)
        inner += f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        inner += f"<NextContinuationToken>{start + 10}</NextContinuationToken>" if more else ""
        return 200, xml("ListBucketResult", inner), {}

    def problem(self, status: int, code: str) -> tuple[Any, ...]:
        text = f"<Error><Code>{code}</Code><Message>the reason</Message></Error>"
        return status, text.encode(), {}

    def error(self, status: int, code: str) -> None:
        self.reply(*self.problem(status, code))

    def reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def checksum(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def xml(name: str, inner: str) -> bytes:
    return f'<?xml version="1.0"?><{name} {NAMESPACE}>{inner}</{name}>'.encode()


@contextmanager
def environment(endpoint: str) -> Iterator[None]:
    """Return endpoint and credentials as the environment variables of AWS's tools."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("AWS_", "FSSPEC_"))]:
            patch.delenv(name)
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "the-key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        yield


def with_store(work: Callable[[ObjectStore], object]) -> None:
    """Do the work with the store in the environment variables."""
    work(ObjectStore(BucketObjects("s3", BUCKET, "models/tiny")))


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    with answering(server), environment(url(server)):
        yield server
