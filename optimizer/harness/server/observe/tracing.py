"""Spans of requests, over HTTP and gRPC, where --otlp-endpoint names a collector of OpenTelemetry.

A request is one span, a child of the client's where it sent a W3C `traceparent`, with a span for
each part of its time:

    preprocess    from its first byte until it was accepted: received, parsed, tokenized
    queue         until the model began with it
    forward       until the last of its answers, or tokens, was computed
    postprocess   until the response was written

A request that is refused, or answered from the cache, has none of these. Attributes say route (of
gRPC: method), status, model and counts: nothing that a client wrote. Needs opentelemetry-sdk, and
to send opentelemetry-exporter-otlp-proto-http; both are imported here alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...errors import MachineError
from ..grpc.messages import PACKAGE
from ..grpc.messages import SERVICE as GRPC

if TYPE_CHECKING:
    from ..scheduling.engine import Times

NAMES = ("preprocess", "queue", "forward", "postprocess")
CARRIED = ("traceparent", "tracestate")  # headers
SERVICE = "optimize-harness"
FAILED = 500  # statuses from here on are the server's fault
# and these codes: https://opentelemetry.io/docs/specs/semconv/rpc/grpc/#grpc-status
CODES = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")


@dataclass(frozen=True)
class Request:
    """One that ended. status: HTTP's, or the name of gRPC's code. start, end: by time.monotonic, as
    `times` are. headers: HTTP's, or gRPC's metadata. attributes: of its span."""

    route: str
    status: int | str
    start: float
    end: float
    headers: Mapping[str, str]
    times: Times | None = None
    attributes: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """By the server's fault."""
        return self.status in CODES if isinstance(self.status, str) else self.status >= FAILED

    @property
    def protocol(self) -> dict[str, str | int]:
        """Attributes that say which call it was, and how that ended."""
        if isinstance(self.status, int):
            return {"http.route": self.route, "http.response.status_code": self.status}
        return {
            "rpc.system.name": "grpc",
            "rpc.method": f"{PACKAGE}.{GRPC}/{self.route.rpartition(' ')[2]}",
            "rpc.response.status_code": self.status,
        }


class Tracer:
    """Makes the spans. processor: an opentelemetry.sdk.trace.SpanProcessor."""

    def __init__(self, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(
            resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE)
        self._extract = TraceContextTextMapPropagator().extract
        self._inside, self._server = set_span_in_context, SpanKind.SERVER
        self._error = Status(StatusCode.ERROR)

    def add(self, request: Request) -> None:
        """The spans of a request, now that it has ended."""
        zero = time.time_ns() - int(1e9 * time.monotonic())
        carried = {n: request.headers[n] for n in CARRIED if n in request.headers}
        root = self._tracer.start_span(
            request.route,
            self._extract(carried),
            self._server,
            {**request.protocol, **request.attributes},
            start_time=zero + int(1e9 * request.start),
        )
        if request.failed:
            root.set_status(self._error)
        if request.times is not None:
            t = request.times
            instants = (request.start, t.submitted, t.begun, t.ended, request.end)
            for name, (start, end) in zip(NAMES, pairwise(instants), strict=True):
                span = self._tracer.start_span(
                    name, self._inside(root), start_time=zero + int(1e9 * start)
                )
                span.end(zero + int(1e9 * max(start, end)))
        root.end(zero + int(1e9 * request.end))

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()


def sending(endpoint: str, say: Callable[..., None]) -> Tracer:
    """Sends spans to a collector over OTLP/HTTP, in a thread of its own, some at a time; where it
    does not answer they are dropped, which is logged. endpoint: such as
    http://127.0.0.1:4318/v1/traces. Raises MachineError where the packages are not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as e:
        raise MachineError(
            f"not installed: {e.name}",
            where="--otlp-endpoint",
            fix="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
        ) from None
    library = logging.getLogger("opentelemetry")
    library.addHandler(_Told(say))
    library.propagate = False
    return Tracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


class _Told(logging.Handler):
    """What the library logs, as a line of ours."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(level="warning", event="tracing", message=record.getMessage()[:300])
