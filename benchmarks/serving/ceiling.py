"""Texts a second that the server itself can answer: a stand-in for the model answers at once.

    python -m benchmarks.serving.ceiling BUNDLE [--seconds 10] [--batch-ms 1] [--out FILE]

The bundle is one of sentence embeddings. Its model is replaced by a stand-in that answers each
batch after --batch-ms with one vector per text and takes no processor time, like a GPU that pools
in the graph. The rest is `optimize serve`: HTTP, parsing, tokens, scheduling, answers.

Each request holds TEXTS texts of about 64 tokens. A client keeps CLIENTS requests in flight, sends
bytes made beforehand, and reads answers without parsing them.

    json      POST /v2/models/NAME/infer, JSON in and out
    binary    the same, BYTES and FP32 as binary tensors
    openai    POST /v1/embeddings, base64

texts_per_second includes the client, on the same processors. server_us_per_text is processor time
of the server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.overhead import cpu, serving
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.commands import serve as command
from optimizer.harness.commands.command_line import parse_arguments
from optimizer.harness.inputs.text import NEUTRAL
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.tasks.answering import Predictor

TEXTS, TOKENS, CLIENTS = 32, 64, 8
ROWS = 64  # maximum rows of a batch
WAIT = 5.0  # queue limit in seconds: all clients together wait, and none is refused
WARM = 1.0  # seconds before counting
CHUNK = 1 << 16


class StandIn(Bundle):
    """A bundle whose model answers every batch after `seconds`."""

    seconds = 0.0

    @property
    def predictor(self) -> Predictor:
        return Predictor(self.contract, self.encoder, self._infer)

    def _infer(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(self.seconds)
        rows = len(next(iter(arrays.values())))
        width = self.contract.vectors.width(int(self.contract.outputs[0].axes[-1]))
        return {self.task.answer_output: np.full((rows, width), width**-0.5, np.float32)}


def serve(folder: str, milliseconds: str) -> int:
    """Serve the bundle in `folder` with a stand-in for its model."""

    def opened(_path: Path | None, stack: ExitStack) -> Bundle:
        bundle = stack.enter_context(StandIn(Path(folder)))
        bundle.seconds = float(milliseconds) / 1000
        return bundle

    options = ["--port", "0", "--rows", str(ROWS), "--max-wait", str(WAIT), "--batching", "padded"]
    return command.run(opened, parse_arguments(["serve", *options]))


def requests(name: str, texts: list[str]) -> dict[str, bytes]:
    """{format: request of all texts as bytes}."""
    data = b"".join(struct.pack("<I", len(t.encode())) + t.encode() for t in texts)
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1]}
    head = json.dumps(
        {
            "inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}],
            "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}],
        }
    ).encode()
    infer = f"/v2/models/{name}/infer"
    document = {"inputs": [{**tensor, "data": texts}]}
    openai = {"model": name, "input": texts, "encoding_format": "base64"}
    return {
        "json": _request(infer, json.dumps(document).encode()),
        "binary": _request(infer, head + data, f"Inference-Header-Content-Length: {len(head)}\r\n"),
        "openai": _request("/v1/embeddings", json.dumps(openai).encode()),
    }


def _request(path: str, body: bytes, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def measure(port: int, process: int, request: bytes, seconds: float) -> dict[str, Any]:
    """Send `request` on CLIENTS connections for `seconds`. process: id of the server"""
    answered, end = 0, 0.0

    async def client() -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=CHUNK)
        while not end or time.perf_counter() < end:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            answered += 1
        writer.close()

    clients = [asyncio.ensure_future(client()) for _ in range(CLIENTS)]
    await asyncio.wait(clients, timeout=WARM)
    before, spent, start = answered, cpu(process), time.perf_counter()
    end = start + seconds
    await asyncio.gather(*clients)
    texts, passed = TEXTS * (answered - before), time.perf_counter() - start
    return {
        "texts_per_second": round(texts / passed),
        "server_us_per_text": round(1e6 * (cpu(process) - spent) / texts, 1),
    }


def texts_of(bundle: Bundle) -> list[str]:
    """TEXTS texts of TOKENS tokens, as the bundle's tokenizer counts them."""
    words = " ".join(NEUTRAL).split()
    made = []
    for first in range(TEXTS):
        count = 1
        while len(bundle.encoder.encode(_words(words, first, count + 1)).ids) <= TOKENS:
            count += 1
        made.append(_words(words, first, count))
    return made


def _words(words: list[str], first: int, count: int) -> str:
    return " ".join(words[(first * 7 + i) % len(words)] for i in range(count))


def main() -> None:
    args = _arguments()
    with Bundle(args.bundle) as bundle:
        texts, name = texts_of(bundle), str(bundle.manifest["name"])
    code = "import sys; from benchmarks.serving import ceiling; ceiling.serve(*sys.argv[1:])"
    with serving([sys.executable, "-c", code, str(args.bundle), str(args.batch_ms)]) as server:
        port = int(server.line("listening")["port"])
        each = partial(measure, port, server.process.pid, seconds=args.seconds)
        rows = {n: asyncio.run(each(request=r)) for n, r in requests(name, texts).items()}
    machine = describe_machine()
    document = {
        "machine": {"cpu": machine.cpu, "cores": machine.cores},
        "texts_per_request": TEXTS,
        "tokens": TOKENS,
        "clients": CLIENTS,
        "batch_ms": args.batch_ms,
        "formats": rows,
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--batch-ms", type=float, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
