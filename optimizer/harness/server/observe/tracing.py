"""Send spans of HTTP and gRPC requests to the OpenTelemetry collector of --otlp-endpoint.

A request is one span, a child of the client's span where it sent a W3C `traceparent`. Its child
spans are consecutive:

    preprocess    from its first byte until it is accepted: receive, parse, tokenize
    queue         until the model begins to run it
    forward       until the last answer or token is computed
    postprocess   until the response is written

A request that is refused, or answered from a cache, has no child spans. Attributes are the route or
method, status, model and counts; none is a text of a client. Needs opentelemetry-sdk, and
opentelemetry-exporter-otlp-proto-http to send; both are imported here alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...errors import MachineError
from ..grpc.messages import PACKAGE
from ..grpc.messages import SERVICE as GRPC

if TYPE_CHECKING:
    from ..request import Request

NAMES = ("preprocess", "queue", "forward", "postprocess")
COUNTS = ("tokens", "truncated")  # numbers of the log line that a span has too
CARRIED = ("traceparent", "tracestate")  # headers
SERVICE = "optimize-harness"
FAILED = 500  # lowest status that is the server's fault
# gRPC's statuses that are: https://opentelemetry.io/docs/specs/semconv/rpc/grpc/#grpc-status
CODES = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")


def _failed(status: int | str) -> bool:
    """Return True if the status of a traced request means that the server is at fault."""
    return status in CODES if isinstance(status, str) else status >= FAILED


def _attributes(request: Request) -> dict[str, str | int]:
    """Return the attributes of a server's trace span of a request."""
    attributes: dict[str, str | int] = {"request_id": request.id}
    if request.model:
        attributes |= {"model": request.model, "version": request.version}
    attributes |= {n: c for n, c in request.counts.items() if n in COUNTS}
    if isinstance(request.status, int):
        attributes["http.route"] = request.route
        attributes["http.response.status_code"] = request.status
        return attributes
    return attributes | {
        "rpc.system.name": "grpc",
        "rpc.method": f"{PACKAGE}.{GRPC}/{request.route.rpartition(' ')[2]}",
        "rpc.response.status_code": request.status,
    }


class Tracer:
    """Converter of a server's ended requests to trace spans.

    processor: an opentelemetry.sdk.trace.SpanProcessor
    """

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
        """Make the trace spans of a request that has ended, to be exported."""
        zero = time.time_ns() - int(1e9 * time.monotonic())
        carried = {n: request.headers[n] for n in CARRIED if n in request.headers}
        root = self._tracer.start_span(
            request.route,
            self._extract(carried),
            self._server,
            _attributes(request),
            start_time=zero + int(1e9 * request.start),
        )
        if _failed(request.status):
            root.set_status(self._error)
        t = None if request.result is None else request.result.times
        if t is not None:
            instants = (request.start, t.submitted, t.begun, t.ended, request.end)
            for name, (start, end) in zip(NAMES, pairwise(instants), strict=True):
                span = self._tracer.start_span(
                    name, self._inside(root), start_time=zero + int(1e9 * start)
                )
                span.end(zero + int(1e9 * max(start, end)))
        root.end(zero + int(1e9 * request.end))

    def close(self) -> None:
        """Send the spans that were not exported yet, when the server ends."""
        self._provider.shutdown()


def start_tracer(endpoint: str, say: Callable[..., None]) -> Tracer:
    """Return a tracer that sends batches of spans over OTLP/HTTP in its own thread.

    endpoint: address such as http://127.0.0.1:4318/v1/traces
    say: function that logs one line

    Spans that the collector does not accept are dropped, which is logged. Raises MachineError if
    the packages are not installed.
    """
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
    library.addHandler(_LogLines(say))
    library.propagate = False
    return Tracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


class _LogLines(logging.Handler):
    """Handler that logs the warnings of OpenTelemetry in the server as JSON lines."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(level="warning", event="tracing", message=record.getMessage()[:300])
