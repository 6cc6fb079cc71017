"""Spans of requests, as OpenTelemetry's own exporter has them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.errors import MachineError
from optimizer.harness.server.observe import tracing
from optimizer.harness.server.request import Request
from tests.harness.server.over_grpc import Ask, needs_grpc, over_grpc, refused, texts_request
from tests.harness.server.serving import Client, on_server
from tests.package.bundles import small_bundle

export = pytest.importorskip(
    "opentelemetry.sdk.trace.export", reason="pip install '.[traces]': opentelemetry-sdk"
)
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WORD = "confidential"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_bundle.make(tmp_path_factory.mktemp("traced")) / "bundle"


def spans_of(bundle: Path, ask: Any, *words: str, run: Any = on_server) -> list[Any]:
    """run: on_server, or over_grpc for `ask` with a function that calls."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = tracing.Tracer(export.SimpleSpanProcessor(exporter))

    async def test(*client: Any) -> None:
        await ask(*client)

    run(bundle, test, *words, tracer=tracer)
    return list(exporter.get_finished_spans())


def embed(**headers: str) -> Any:
    body = {"model": "tiny", "input": WORD}
    return lambda client: client.ask("POST", "/v1/embeddings", body, headers)


def embedded(bundle: Path, protocol: str, **headers: str) -> list[Any]:
    """The spans of a request over HTTP or gRPC."""
    if protocol == "http":
        return spans_of(bundle, embed(**headers))
    request = texts_request([WORD.encode()])

    async def ask(_: Client, call: Ask) -> None:
        await call("ModelInfer", request, metadata=tuple(headers.items()))

    return spans_of(bundle, ask, run=over_grpc)


protocols = pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=needs_grpc)])
ANSWERED = {
    "http": {"http.route": "v1 embeddings", "http.response.status_code": 200},
    "grpc": {
        "rpc.system.name": "grpc",
        "rpc.method": "inference.GRPCInferenceService/ModelInfer",
        "rpc.response.status_code": "OK",
    },
}


@protocols
def test_a_request_is_a_span_with_its_parts_in_their_order(made: Path, protocol: str) -> None:
    *parts, root = embedded(made, protocol)
    assert tuple(s.name for s in parts) == tracing.NAMES
    assert all(s.parent.span_id == root.context.span_id for s in parts)
    instants = [root.start_time, *(s.end_time for s in parts)]
    assert instants == sorted(instants)
    assert [s.start_time for s in parts] == instants[:-1]  # no time between them is left out
    assert instants[-1] == root.end_time
    assert ANSWERED[protocol].items() <= dict(root.attributes).items()
    assert (root.attributes["model"], root.attributes["tokens"]) == ("tiny", len(WORD) + 2)


@protocols
def test_it_is_part_of_the_trace_that_its_client_sends(made: Path, protocol: str) -> None:
    header = f"00-{TRACE}-{PARENT}-01"
    spans = embedded(made, protocol, traceparent=header, tracestate="vendor=1")
    assert {f"{s.context.trace_id:032x}" for s in spans} == {TRACE}
    assert f"{spans[-1].parent.span_id:016x}" == PARENT
    assert spans[-1].context.trace_state["vendor"] == "1"


@protocols
def test_a_client_that_wants_no_trace_has_none(made: Path, protocol: str) -> None:
    assert embedded(made, protocol, traceparent=f"00-{TRACE}-{PARENT}-00") == []


def test_a_text_that_is_continued_has_them_too_also_streamed(decoder_bundle: Path) -> None:
    async def ask(client: Client) -> None:
        for stream in (False, True):
            await client.complete(WORD, max_tokens=3, stream=stream)

    names = [s.name for s in spans_of(decoder_bundle, ask)]
    assert names == [*tracing.NAMES, "v1 completions"] * 2


@needs_grpc
def test_each_request_of_a_stream_has_them(decoder_bundle: Path) -> None:
    async def ask(_: Client, call: Ask) -> None:
        stream = call.stream()
        for _ in range(2):
            request = texts_request([WORD.encode()], model_name="tiny-decoder")
            request.parameters["max_new_tokens"].int64_param = 1
            await stream.write(request)
            await stream.read()
        await stream.done_writing()

    names = [s.name for s in spans_of(decoder_bundle, ask, run=over_grpc)]
    assert names == [*tracing.NAMES, "grpc ModelStreamInfer"] * 2


def test_nothing_that_a_client_wrote_is_in_a_span(made: Path) -> None:
    async def ask(client: Client) -> None:
        await embed(**{"x-wrong": WORD})(client)
        await client.ask("POST", f"/{WORD}", {"input": WORD})
        await client.ask(WORD.upper(), "/v1/embeddings", {"input": [WORD, 1]})
        await client.ask("POST", f"/v2/models/{WORD}/infer", {"inputs": WORD})

    spans = spans_of(made, ask)
    assert [s.attributes["http.response.status_code"] for s in spans if s.parent is None] == [
        *(200, 404, 405, 404)
    ]
    assert WORD not in " ".join(s.to_json() for s in spans).lower()


@needs_grpc
def test_a_call_that_is_refused_has_its_code_and_nothing_that_a_client_wrote(made: Path) -> None:
    late = texts_request([WORD.encode()])
    late.parameters["timeout"].int64_param = 1

    async def ask(_: Client, call: Ask) -> None:
        unknown = texts_request([WORD.encode()], model_name=WORD)
        for request, code in ((unknown, "NOT_FOUND"), (late, "DEADLINE_EXCEEDED")):
            assert await refused(call("ModelInfer", request)) == code

    spans = spans_of(made, ask, run=over_grpc)
    found = [(s.attributes["rpc.response.status_code"], s.status.is_ok) for s in spans]
    assert found == [("NOT_FOUND", True), ("DEADLINE_EXCEEDED", False)]
    assert WORD not in " ".join(s.to_json() for s in spans).lower()


def test_an_answer_from_the_cache_has_no_forward(made: Path) -> None:
    from optimizer.harness.server.caches.cache import Cache

    async def ask(client: Client) -> None:
        client.app.first_service().cache = Cache(1 << 20)
        for _ in range(2):
            await embed()(client)

    names = [s.name for s in spans_of(made, ask)]
    assert names == [*tracing.NAMES, "v1 embeddings", "v1 embeddings"]


def test_spans_reach_a_collector() -> None:
    """A collector of the protocol's own messages."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received, lines = list[str](), list[dict[str, Any]]()

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = await reader.readexactly(length)
        if "content-encoding: gzip" in head:
            raise AssertionError(head)
        message = ExportTraceServiceRequest.FromString(body)
        spans = message.resource_spans[0].scope_spans[0].spans
        received.extend(span.name for span in spans)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(collect, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        tracer = tracing.start_tracer(
            f"http://127.0.0.1:{port}/v1/traces", lambda **line: lines.append(line)
        )
        tracer.add(Request(headers={}, route="v1 embeddings", status=200, start=0.0, end=1.0))
        await asyncio.to_thread(tracer.close)
        server.close()

    asyncio.run(scenario())
    assert received == ["v1 embeddings"], lines


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(MachineError, match="pip install opentelemetry-sdk"):
        tracing.start_tracer("http://127.0.0.1:1", lambda **_: None)
