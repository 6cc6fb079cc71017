"""A request's trace is in its log line, and a wrong header is no reason to refuse it."""

from pathlib import Path

import pytest

from optimizer.harness.server.observe.trace_context import trace_fields
from tests.harness.server.serving import Client, on_server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RIGHT = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    "header", [RIGHT, f"01-{TRACE}-{PARENT}-01-more", f"00-{TRACE}-{PARENT}-00"]
)
def test_the_ids_of_a_right_header(header: str) -> None:
    assert trace_fields(header) == {"trace_id": TRACE, "parent_id": PARENT}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        RIGHT.upper(),
        RIGHT[:-1],
        f"{RIGHT}-more",
        f"{RIGHT}\n",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{PARENT}-01",
        f"00-{TRACE[:-1]}٣-{PARENT}-01",
    ],
)
def test_anything_else_is_no_trace(header: str | None) -> None:
    assert trace_fields(header) == {}


def test_the_log_line_of_a_request_has_them(made: Path) -> None:
    async def test(client: Client) -> None:
        body = {"model": "tiny", "input": "good"}
        for header, expected in ((RIGHT, TRACE), ("wrong", None)):
            reply = await client.ask("POST", "/v1/embeddings", body, {"traceparent": header})
            assert reply.status == 200
            assert client.lines[-1].get("trace_id") == expected

    on_server(made, test)
