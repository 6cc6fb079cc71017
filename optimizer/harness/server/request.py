"""A request over HTTP or gRPC, from its arrival to its log line, metrics and spans."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .inference import Service
    from .scheduling.engine import Result


@dataclass(kw_only=True)
class Request:
    """
    headers: HTTP's headers, or gRPC's metadata
    route: template of the path or method for logs and errors; never the path itself, which a
        client writes
    start, end: seconds by time.monotonic
    status: HTTP's status, or the name of gRPC's status code
    service: version that answers, once it is known
    result: answer, complete once the last of it is sent; None for a request without one
    """

    headers: Mapping[str, str]
    client: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    route: str = "unknown"
    start: float = field(default_factory=time.monotonic)
    end: float = 0.0
    status: int | str = ""
    service: Service | None = None
    result: Result | None = None

    @property
    def counts(self) -> dict[str, Any]:
        """Numbers of the answer for a log line; empty without one."""
        result = self.result
        if result is None:
            return {}
        return {
            "tokens": result.tokens,
            "queue_ms": round(1000 * result.queued, 3),
            "model_ms": round(1000 * result.model, 3),
            "truncated": result.truncated,
            **({"cache": result.cache} if result.cache else {}),
        }
