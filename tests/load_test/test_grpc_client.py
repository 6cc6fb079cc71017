"""A call over gRPC is answered, refused for load, or lost."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from optimizer.foundation.errors import MachineError
from optimizer.harness.server.grpc import messages
from optimizer.load_test.grpc_client import GrpcClient
from optimizer.load_test.open_loop import Reply
from optimizer.load_test.requests import RequestKind

grpc = pytest.importorskip("grpc")
KIND = RequestKind("grpc infer", str, lambda *_: {}, str)


def outcome_of(code: str | None, patience: float = 20.0) -> Reply:
    """Reply to a call that a server ends with this code; None: it answers; "": it never ends."""
    method = messages.methods()["ModelInfer"]

    async def infer(request: Any, context: Any) -> Any:
        if code == "":
            await asyncio.Event().wait()
        if code:
            await context.abort(grpc.StatusCode[code], "no")
        return method.response(model_name=request.raw_input_contents[0][4:].decode())

    async def scenario() -> Reply:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            infer, method.request.FromString, method.response.SerializeToString
        )
        service = f"{messages.PACKAGE}.{messages.SERVICE}"
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"ModelInfer": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with GrpcClient(f"grpc://127.0.0.1:{port}", "m", "", patience) as client:
            outcome = await client.ask(KIND, "m", "text", Reply(0.0), time.perf_counter())
        await server.stop(None)
        return outcome

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "status", "lost"),
    [
        (None, 200, ""),
        ("RESOURCE_EXHAUSTED", 503, ""),
        ("DEADLINE_EXCEEDED", 503, ""),
        ("INTERNAL", 0, "INTERNAL"),
    ],
)
def test_a_call_is_answered_refused_or_lost(code: str | None, status: int, lost: str) -> None:
    outcome = outcome_of(code)
    assert (outcome.status, outcome.lost) == (status, lost)
    assert outcome.ended >= outcome.sent > 0


def test_an_answer_that_does_not_come_in_time_is_lost() -> None:
    assert outcome_of("", patience=0.05).lost == "no answer in time"


def test_where_nothing_listens_it_says_so() -> None:
    async def scenario() -> None:
        async with GrpcClient("grpc://127.0.0.1:9", "m", "", 5.0) as client:
            await client.model()

    with pytest.raises(MachineError, match="Is the server running"):
        asyncio.run(scenario())
