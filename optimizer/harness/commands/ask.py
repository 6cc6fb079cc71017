"""Option `serve --ask TEXT`: send a request to the server's own socket, print the answer, end."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ..errors import MachineError
from ..server.inference import ANSWER, Service
from ..shown import Pieces, escape_lines

SHOWN = (
    "vllm:",
    "nv_inference_count",
    "optimize_request_seconds_sum",
)  # prefixes of printed metrics


async def ask(service: Service, address: tuple[str, int], token: str, text: str) -> None:
    """Send `text` to a server at (host, port) from the command line, print the answer (token by
    token in text generation) and some metrics. Raises MachineError without an answer."""
    model = service.engine.model
    if model.task.generates:
        chat = model.contract.decoder.chat_template is not None
        document: dict[str, Any] = {"model": service.name, "stream": True}
        document |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        printed = Pieces()
        async for line in _lines(address, path, token, document):
            if line.startswith("data: {"):
                _show(json.loads(line[6:]), printed)
        sys.stdout.write(printed.end())
    else:
        kind = service.engine.model.task.inputs
        data = [kind.sent(text)]
        tensor = {"name": kind.fields[0], "datatype": "BYTES", "shape": [1], "data": data}
        document = {"inputs": [tensor], "outputs": [{"name": ANSWER}]}
        path = f"/v2/models/{service.name}/infer"
        body = [line async for line in _lines(address, path, token, document)][-1]
        sys.stdout.write(escape_lines(json.loads(body)["outputs"][0]["data"][0]))
    sys.stdout.write("\n\n")
    async for line in _lines(address, "/metrics", token):
        if line.startswith(SHOWN) and "_bucket" not in line:
            sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _show(event: Mapping[str, Any], printed: Pieces) -> None:
    if "error" in event:
        raise MachineError(str(event["error"]["message"]), where="--ask")
    for choice in event["choices"]:
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        sys.stdout.write(printed.add(text))
        sys.stdout.flush()


async def _lines(
    address: tuple[str, int], path: str, token: str, document: Mapping[str, Any] | None = None
) -> AsyncIterator[str]:
    """Send a server a request for `path` from the command line and yield the lines of the
    response's body as they arrive.

    address: (host, port)
    token: bearer token, or ""
    document: JSON body of a POST request; None: a GET request

    Raises MachineError for a status other than 200.
    """
    host, port = address
    named = f"[{host}]" if ":" in host else host
    body = b"" if document is None else json.dumps(document).encode()
    head = [f"{'GET' if document is None else 'POST'} {path} HTTP/1.1", f"host: {named}"]
    head += ["connection: close", f"content-length: {len(body)}"]
    head += [f"authorization: Bearer {token}"] if token else []
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        status = (await reader.readline()).split()[1:2]
        while (await reader.readline()).strip():
            pass  # headers
        async for line in reader:
            if status != [b"200"]:
                raise MachineError(line.decode().strip()[:500], where="--ask")
            if line.strip():
                yield line.decode().rstrip("\r\n")
    finally:
        writer.close()
