"""HTTP to one registry: a connection that is kept, credentials, redirects, and another attempt.

Credentials go to the registry's own host, and to the token service that it names; a redirect to
another host (where many registries keep their blobs) gets none.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlencode, urljoin, urlsplit

from optimizer import __version__
from optimizer.errors import MachineError, RecipeError
from optimizer.harness.errors import BundleError

SECONDS = 300  # without a byte: a registry reads a large blob again before it answers
ATTEMPTS = 4
WAIT = 0.5  # seconds before the second attempt, twice as long before each further one
AGAIN = frozenset({429, 500, 502, 503, 504})
MOVED = frozenset({301, 302, 303, 307, 308})
MOST_REDIRECTS = 5
LARGEST_ANSWER = 16 << 20  # bytes of an answer that is kept in memory
CHUNK = 1 << 20
LOCAL = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?")
FIELD = re.compile(r'(\w+)="([^"]*)"')
Body = Path | bytes | None


@dataclass(frozen=True)
class Answer:
    """status, headers with small names, and the bytes, unless they were written to a file."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    def problem(self) -> str:
        """What a registry says is wrong: its codes and messages."""
        try:
            errors = json.loads(self.data)["errors"]
            parts = [f"{e.get('code', '')} {e.get('message', '')}".strip() for e in errors[:3]]
            return f"status {self.status}: {'; '.join(parts)}"[:300]
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"status {self.status}"


class Sink:
    """A file that an answer is written to, and no more of it than was promised: a blob that goes
    on and on would fill the disk."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def tell(self) -> int:
        return self._file.tell()

    def restart(self) -> None:
        """What comes is the whole, whatever part was asked for."""
        self._file.seek(0)
        self._file.truncate()

    def write(self, data: bytes) -> None:
        if self.tell() + len(data) > self._size:
            raise BundleError(
                f"more than the {self._size:,} bytes that the manifest promises",
                where="blob",
                fix="Do not use it; another one stands in its place.",
            )
        self._file.write(data)


@dataclass
class Transport:
    """host: of the registry, with its port. plain: HTTP where the host is not this machine, too.

    basic: gives the value of the header Authorization, or None; called once it is asked for.
    """

    host: str
    basic: Callable[[], str | None]
    plain: bool = False
    sleep: Callable[[float], None] = time.sleep
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
    ) -> Answer:
        """url: absolute, or a path on the registry. into: what a good answer is written to.

        Tries again what a server or the line may do better the next time. Raises MachineError
        where there is no answer, or no permission.
        """
        target = urljoin(self.base, url)
        start = into.tell() if into else 0
        wait = WAIT
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._authorized(method, target, headers or {}, body, into)
                if answer.status not in AGAIN or attempt == ATTEMPTS:
                    return answer
            except (http.client.HTTPException, OSError) as e:
                self.close()
                refused = isinstance(e, ConnectionRefusedError | ssl.SSLError)
                if refused or attempt == ATTEMPTS or isinstance(e, FileNotFoundError):
                    raise self._unanswered(e) from e
                if into is not None and into.tell() != start:
                    raise self._unanswered(e) from e  # the next run goes on from here
            self.sleep(wait)
            wait *= 2
        raise AssertionError("unreachable")

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _unanswered(self, error: Exception) -> MachineError:
        secure = isinstance(error, ssl.SSLError) and "--plain-http if it speaks HTTP only. "
        return MachineError(
            f"the registry does not answer ({type(error).__name__}: {error})"[:300],
            where=self.host,
            fix=f"Check the host and the network; {secure or ''}"
            "the same command goes on where it stopped.",
        )

    def _authorized(
        self, method: str, url: str, headers: Mapping[str, str], body: Body, into: Sink | None
    ) -> Answer:
        answer = self._redirected(method, url, headers, body, into)
        if answer.status != 401:
            return answer
        before = self._authorization
        self._authorization = self._log_in(answer.headers.get("www-authenticate", ""))
        if self._authorization == before:
            raise self._forbidden(answer)
        answer = self._redirected(method, url, headers, body, into)
        if answer.status == 401:
            raise self._forbidden(answer)
        return answer

    def _forbidden(self, answer: Answer) -> MachineError:
        return MachineError(
            f"not allowed ({answer.problem()})", where=self.host, fix=f"docker login {self.host}"
        )

    def _log_in(self, challenge: str) -> str | None:
        """The header that answers a challenge: Basic, or a token of the service that it names."""
        kept = self.basic()
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() != "bearer":
            return kept
        fields = dict(FIELD.findall(rest))
        service = urlsplit(fields.get("realm", ""))
        if service.scheme != "https" and not (
            service.scheme == "http" and self.base.startswith("http:")
        ):
            raise MachineError(
                f"its token service is {fields.get('realm', '')!r:.200}",
                where=self.host,
                accepted="one that is reached by https",
            )
        query = urlencode({k: fields[k] for k in ("service", "scope") if k in fields})
        answer = self._once(
            "GET",
            f"{service.geturl()}{'&' if service.query else '?'}{query}",
            {"Authorization": kept} if kept else {},
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

    def _redirected(
        self, method: str, url: str, headers: Mapping[str, str], body: Body, into: Sink | None
    ) -> Answer:
        for _ in range(MOST_REDIRECTS):
            own = url.startswith(f"{self.base}/")
            added = {"Authorization": self._authorization} if own and self._authorization else {}
            answer = self._once(method, url, {**headers, **added}, body, into)
            if answer.status not in MOVED or "location" not in answer.headers:
                return answer
            target = urljoin(url, answer.headers["location"])
            if url.startswith("https:") and not target.startswith("https:"):
                raise MachineError("it redirects from https to http", where=self.host)
            url = target
        raise MachineError(f"more than {MOST_REDIRECTS} redirects", where=self.host)

    def _once(
        self, method: str, url: str, headers: Mapping[str, str], body: Body, into: Sink | None
    ) -> Answer:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MachineError(f"it names the address {url!r:.200}", where=self.host)
        connection = self._connection(parts.scheme, parts.netloc)
        path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        sent = {"User-Agent": f"optimize-toolchain/{__version__}", **headers}
        with _opened(body) as (content, size):
            if content is not None:
                sent["Content-Length"] = str(size)
            elif method in ("POST", "PUT", "PATCH"):
                sent["Content-Length"] = "0"
            connection.request(method, path, body=content, headers=sent)
            response = connection.getresponse()
        good = response.status in (200, 206)
        data = b""
        if into is not None and good:
            if response.status == 200:
                into.restart()
            while chunk := response.read(CHUNK):
                into.write(chunk)
        else:
            data = response.read(LARGEST_ANSWER + 1)
            if len(data) > LARGEST_ANSWER:
                raise MachineError(f"an answer above {LARGEST_ANSWER:,} bytes", where=self.host)
        fields = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, fields, data)

    def _connection(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        key = (scheme, netloc)
        if key not in self._connections:
            kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
            try:
                self._connections[key] = kind(netloc, timeout=SECONDS, blocksize=CHUNK)
            except http.client.InvalidURL:
                raise RecipeError("no port number", where=netloc) from None
        return self._connections[key]


@contextmanager
def _opened(body: Body) -> Iterator[tuple[BinaryIO | bytes | None, int]]:
    if isinstance(body, Path):
        with body.open("rb") as f:
            yield f, body.stat().st_size
    else:
        yield body, len(body or b"")
