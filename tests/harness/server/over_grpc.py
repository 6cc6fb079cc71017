"""A server over gRPC on this process's own event loop, and calls of its methods."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.server.grpc.messages import STREAM, methods
from optimizer.harness.server.http.request import Security
from tests.harness.server.serving import Client, on_server

SERVICE = "/inference.GRPCInferenceService"
needs_grpc = pytest.mark.skipif(
    not find_spec("grpc"), reason="grpcio is not installed: pip install '.[serve]'"
)


class Ask:
    """Calls methods of a server. server: a GrpcServer."""

    def __init__(self, channel: Any, server: Any) -> None:
        self._channel, self.server = channel, server

    async def __call__(self, name: str, message: Any = None, **options: Any) -> Any:
        method = methods()[name]
        call = self._channel.unary_unary(
            f"{SERVICE}/{name}",
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return await call(message or method.request(), timeout=20, **options)

    def stream(self, **options: Any) -> Any:
        """An open stream of requests and answers: write(), done_writing(), read(), cancel()."""
        method = methods()[STREAM]
        call = self._channel.stream_stream(
            f"{SERVICE}/{STREAM}",
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return call(**{"timeout": 20, **options})


def over_grpc(
    made: Path,
    test: Callable[[Client, Ask], Awaitable[None]],
    *words: str,
    token: str = "",
    calls: int | None = None,
    of_client: int | None = None,
    seconds: float = 10.0,
    **more: Any,
) -> None:
    """Run a test with a client of a server's own. words: options of serve."""

    async def run(client: Client) -> None:
        import grpc

        from optimizer.harness.server.grpc.server import GrpcServer

        server = GrpcServer(client.app, calls, of_client)
        port = await server.start("127.0.0.1", 0)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await test(client, Ask(channel, server))
        finally:
            await server.close(0)

    security = Security(token=token, largest=1 << 20, body_seconds=seconds)
    on_server(made, run, *words, security=security, **more)


def texts_request(texts: list[bytes], **fields: Any) -> Any:
    request = methods()["ModelInfer"].request(**{"model_name": "tiny", **fields})
    request.inputs.add(name="text", datatype="BYTES", shape=[len(texts)])
    raw = b"".join(struct.pack("<I", len(t)) + t for t in texts)
    request.raw_input_contents.append(raw)
    return request


async def refused(answer: Awaitable[Any]) -> str:
    import grpc

    with pytest.raises(grpc.RpcError) as e:
        await answer
    assert "confidential" not in e.value.details()
    return str(e.value.code().name)
