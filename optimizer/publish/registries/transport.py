"""Send HTTP requests to one registry, with credentials, redirects, retries and open connections.

Credentials go to the registry's host, and to a token service that token_services.py accepts. A
redirect to another host (where many registries store blobs) gets none.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import BinaryIO, Self
from urllib.parse import SplitResult, urlencode, urljoin, urlsplit

from optimizer import __version__
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.errors import BundleError
from optimizer.publish.registries.token_services import is_token_service

UPLOAD_SECONDS = 300  # until the answer begins; a registry reads a large blob before answering
ANSWER_SECONDS = 60  # until the answer to a request without a body begins
BODY_SECONDS = 30.0  # interval in which an answer's body must bring LEAST_BYTES
LEAST_BYTES = 4096
ATTEMPTS = 4
WAIT = 0.5  # seconds before the second attempt, twice as long before each further one
RETRIED = frozenset({429, 500, 502, 503, 504})
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MOST_REDIRECTS = 5
LARGEST_ANSWER = 16 << 20  # bytes of an answer that is read into memory
CHUNK = 1 << 20
LOCAL = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?")
FIELD = re.compile(r'(\w+)="([^"]*)"')
Body = Path | bytes | None


@dataclass(frozen=True)
class RegistryResponse:
    """A registry's answer to a request: headers by lower-case name; data is empty if written to a
    file."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    def problem(self) -> str:
        """Return the status and the errors that a registry's answer lists, in one sentence."""
        try:
            errors = json.loads(self.data)["errors"]
            parts = [f"{e.get('code', '')} {e.get('message', '')}".strip() for e in errors[:3]]
            return f"status {self.status}: {'; '.join(parts)}"[:300]
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"status {self.status}"


class Sink:
    """File for the body of a registry's answer, of at most `size` bytes: an endless blob would fill
    the disk."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def tell(self) -> int:
        return self._file.tell()

    def restart(self) -> None:
        """Empty the file of a registry's blob: the answer is the whole blob, not the requested
        range."""
        self._file.seek(0)
        self._file.truncate()

    def write(self, data: bytes) -> None:
        """Append a part of a response's body to the file or buffer. Raises BundleError beyond
        `size` bytes."""
        if self.tell() + len(data) > self._size:
            raise BundleError(
                f"the registry sends more than the {self._size:,} bytes that the manifest lists",
                where="a file of the bundle",
                fix="Do not use it; get the bundle elsewhere.",
            )
        self._file.write(data)


@dataclass
class Transport:
    """HTTP client of one registry.

    host: the registry's HOST or HOST:PORT
    basic: function that returns the value of the header Authorization, or None; called after a 401
    plain: True uses HTTP also for hosts other than this machine
    token_services: HOST or HOST:PORT of services that may also get that value, by https
    body_seconds: interval in seconds in which an answer's body must bring LEAST_BYTES
    """

    host: str
    basic: Callable[[], str | None]
    plain: bool = False
    token_services: tuple[str, ...] = ()
    sleep: Callable[[float], None] = time.sleep
    body_seconds: float = BODY_SECONDS
    _authorization: str | None = None
    _connections: dict[tuple[str, str], http.client.HTTPConnection] = field(default_factory=dict)

    @property
    def base(self) -> str:
        scheme = "http" if self.plain or LOCAL.fullmatch(self.host) else "https"
        return f"{scheme}://{self.host}"

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Body = None,
        into: Sink | None = None,
    ) -> RegistryResponse:
        """Send a request to the registry, with retries after temporary failures.

        url: absolute URL, or path on the registry.
        into: file for the body of a successful answer.

        Raises MachineError for a missing answer or permission.
        """
        target = self.resolve_url(self.base, url)
        start = into.tell() if into else 0
        wait = WAIT
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._send_authorized(method, target, headers or {}, body, into)
                if answer.status not in RETRIED or attempt == ATTEMPTS:
                    return answer
            except (http.client.HTTPException, OSError) as e:
                self.close()
                refused = isinstance(e, ConnectionRefusedError | ssl.SSLError)
                if refused or attempt == ATTEMPTS or isinstance(e, FileNotFoundError):
                    raise self._no_answer(e) from e
                if into is not None and into.tell() != start:
                    raise self._no_answer(e) from e  # the next run resumes here
            self.sleep(wait)
            wait *= 2
        raise AssertionError("unreachable")

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _no_answer(self, error: Exception) -> MachineError:
        secure = isinstance(error, ssl.SSLError) and "If it speaks only HTTP: --plain-http. "
        return MachineError(
            f"the registry does not answer ({type(error).__name__}: {error})"[:300],
            where=self.host,
            fix=f"Check the host and the network. {secure or ''}The same command resumes.",
        )

    def _send_authorized(
        self, method: str, url: str, headers: Mapping[str, str], body: Body, into: Sink | None
    ) -> RegistryResponse:
        answer = self._follow_redirects(method, url, headers, body, into)
        if answer.status != 401:
            return answer
        before = self._authorization
        self._authorization = self._log_in(answer.headers.get("www-authenticate", ""))
        if self._authorization != before:
            answer = self._follow_redirects(method, url, headers, body, into)
        if answer.status == 401:
            raise self._forbidden(answer)
        return answer

    def _forbidden(self, answer: RegistryResponse) -> MachineError:
        return MachineError(
            f"not allowed ({answer.problem()})", where=self.host, fix=f"docker login {self.host}"
        )

    def _log_in(self, challenge: str) -> str | None:
        """Return the header Authorization for a registry's challenge: Basic, or a token from its
        service."""
        basic = self.basic()
        scheme, _, parameters = challenge.partition(" ")
        if scheme.lower() != "bearer":
            return basic
        fields = dict(FIELD.findall(parameters))
        service = self._parts(self.resolve_url(self.base, fields.get("realm", "")))
        self._check_token_service(service)
        query = urlencode({k: fields[k] for k in ("service", "scope") if k in fields})
        answer = self._send_once(
            "GET",
            f"{service.geturl()}{'&' if service.query else '?'}{query}",
            {"Authorization": basic} if basic else {},
            None,
            None,
        )
        try:
            document = json.loads(answer.data) if answer.status == 200 else {}
            token = document.get("token") or document.get("access_token")
        except (ValueError, AttributeError):
            token = None
        if not token:
            raise self._forbidden(answer)
        return f"Bearer {token}"

    def _check_token_service(self, service: SplitResult) -> None:
        """Raises MachineError for a service that may not get the registry's password."""
        if f"{service.scheme}://{service.netloc}" == self.base:
            return
        secure = service.scheme == "https"
        if secure and is_token_service(self.host, service.netloc, self.token_services):
            return
        raise MachineError(
            f"its token service, {service.scheme}://{service.netloc:.200}, is another host",
            where=self.host,
            accepted="the registry's own host and port, or an https host given by --token-service",
            fix=f"If you trust it: --token-service {service.netloc:.200}" if secure else "",
        )

    def _follow_redirects(
        self, method: str, url: str, headers: Mapping[str, str], body: Body, into: Sink | None
    ) -> RegistryResponse:
        for _ in range(MOST_REDIRECTS):
            authorization = self._authorization if url.startswith(f"{self.base}/") else None
            added = {"Authorization": authorization} if authorization else {}
            answer = self._send_once(method, url, {**headers, **added}, body, into)
            if answer.status not in REDIRECTS or "location" not in answer.headers:
                return answer
            target = self.resolve_url(url, answer.headers["location"])
            if url.startswith("https:") and not target.startswith("https:"):
                raise MachineError("the registry redirects from https to http", where=self.host)
            url = target
        raise MachineError(f"more than {MOST_REDIRECTS} redirects", where=self.host)

    def _send_once(
        self, method: str, url: str, headers: Mapping[str, str], body: Body, into: Sink | None
    ) -> RegistryResponse:
        """Send one request to the registry without retries and return its answer.

        into: file for the body of status 200 or 206; None: the answer's `data`

        Raises MachineError for a body in memory beyond LARGEST_ANSWER bytes.
        """
        parts = self._parts(url)
        connection = self._connection(parts.scheme, parts.netloc)
        path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        sent = {"User-Agent": f"optimize-toolchain/{__version__}", **headers}
        with _open_body(body) as (content, size):
            if content is not None:
                sent["Content-Length"] = str(size)
            elif method in ("POST", "PUT", "PATCH"):
                sent["Content-Length"] = "0"
            connection.request(method, path, body=content, headers=sent)
        seconds = UPLOAD_SECONDS if content else ANSWER_SECONDS
        with _Watch(connection.sock, seconds, self.body_seconds) as watch:
            response = connection.getresponse()
            chunks = watch.read_chunks(response)
            data = bytearray()
            if into is not None and response.status in (200, 206):
                if response.status == 200:
                    into.restart()
                for chunk in chunks:
                    into.write(chunk)
            else:
                for chunk in chunks:
                    data += chunk
                    if len(data) > LARGEST_ANSWER:
                        raise MachineError(
                            f"the answer is above {LARGEST_ANSWER:,} bytes", where=self.host
                        )
        fields = {name.lower(): value for name, value in response.getheaders()}
        return RegistryResponse(response.status, fields, bytes(data))

    def resolve_url(self, base: str, reference: str) -> str:
        """Resolve a URL of the registry relative to `base`. Raises MachineError if invalid."""
        try:
            return urljoin(base, reference)
        except ValueError:
            raise self._no_address(reference) from None

    def _parts(self, url: str) -> SplitResult:
        """Split a URL of the registry. Raises MachineError for one that is invalid or holds a
        password."""
        try:
            parts = urlsplit(url)
            valid = parts.port != 0 and parts.scheme in ("http", "https") and parts.hostname
        except ValueError:
            raise self._no_address(url) from None
        if not valid or "@" in parts.netloc or re.search(r"[^!-~]", url):
            raise self._no_address(url)
        return parts

    def _no_address(self, url: str) -> MachineError:
        return MachineError(
            f"the registry sent {url!r:.200}, which is not a URL that can be requested",
            where=self.host,
            accepted="http(s)://HOST/PATH",
        )

    def _connection(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        key = (scheme, netloc)
        if key not in self._connections:
            kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
            try:
                self._connections[key] = kind(netloc, timeout=UPLOAD_SECONDS, blocksize=CHUNK)
            except http.client.InvalidURL:
                raise RecipeError("the port is not a number", where=netloc) from None
        return self._connections[key]


class _Watch:
    """Context that closes a connection to a registry whose answer is too slow.

    first: seconds until the answer must begin.
    then: seconds in which its body must bring LEAST_BYTES; a socket's timeout, which restarts at
        each read, would allow a byte a minute without end.
    """

    def __init__(self, connected: socket.socket, first: float, then: float) -> None:
        self._socket, self._first, self._then = connected, first, then
        self._begun, self._ended = Event(), Event()
        self._received, self._late = 0, False
        self._thread = Thread(target=self._watch, daemon=True)

    def read_chunks(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """Yield the body of a registry's response in chunks, whose bytes are counted so that a
        transfer that is too slow is noticed."""
        self._begun.set()
        while chunk := response.read1(CHUNK):
            self._received += len(chunk)
            yield chunk
        response.close()  # read1 does not mark the end, and the next request would wait

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._ended.set()
        self._begun.set()
        self._thread.join()
        if self._late and (error is None or isinstance(error, http.client.HTTPException | OSError)):
            raise TimeoutError("the answer is too slow") from error

    def _watch(self) -> None:
        seen = -LEAST_BYTES
        if self._begun.wait(self._first):
            while self._received - seen >= LEAST_BYTES:
                seen = self._received
                if self._ended.wait(self._then):
                    return
        if not self._ended.is_set():
            self._late = True
            with suppress(OSError):  # the base class's: SSLSocket.shutdown would drop the TLS state
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


@contextmanager
def _open_body(body: Body) -> Iterator[tuple[BinaryIO | bytes | None, int]]:
    if isinstance(body, Path):
        with body.open("rb") as f:
            yield f, body.stat().st_size
    else:
        yield body, len(body or b"")
