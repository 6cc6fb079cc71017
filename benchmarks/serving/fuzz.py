"""Fuzz a server with valid and malformed requests: no crash, no hang, no wrong answer.

    python -m benchmarks.serving.fuzz BUNDLE [--right 10000] [--malformed 2000] [--seed 0]

BUNDLE is an encoder. Eight clients send requests in one random order. Answers to valid ones (v2 in
JSON and binary, OpenAI's in floats and base64, compressed or not) must equal `predict`'s in every
bit. Malformed ones (bytes changed, cut or added anywhere, wrong lengths, shapes, types and paths,
compression bombs, clients that disconnect) must get a client error or a closed connection; a
request that is still valid after its bytes were changed is compared with `predict` as well. Exit 1
for a wrong or missing answer, a 500, a server that ends, or a bug in its log.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gzip
import json
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.overhead import resident
from optimizer.harness.bundle.bundle import Bundle

WORDS = [
    "a",
    "good",
    "bad",
    "film",
    "the",
    "was",
    "and,",
    "not.",
    "ß",
    "漢字",
    "😀",
    "naïve",
    "3.14",
]
WORDS += ["x-y", "<b>", "\\n", '"', "%s", "../", ";", "--", "NUL"]
PATIENCE = 20.0  # seconds until an answer counts as lost
HEAD = "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n{more}\r\n"


@dataclass(frozen=True)
class Case:
    """One request.

    data: bytes to send
    text: text of a valid request; None for a malformed one
    read: (body, head) -> bytes of the embedding
    leaves: True where the client closes its connection without waiting
    """

    data: bytes
    text: str | None
    read: Callable[[bytes, dict[str, str]], bytes] | None = None
    leaves: bool = False


def request(path: str, body: bytes, more: str = "") -> bytes:
    return HEAD.format(path=path, length=len(body), more=more).encode() + body


def of_openai(body: bytes, _: dict[str, str]) -> bytes:
    value = json.loads(body)["data"][0]["embedding"]
    if isinstance(value, str):
        return base64.b64decode(value)
    return np.array(value, "<f4").tobytes()


def of_v2(body: bytes, head: dict[str, str]) -> bytes:
    length = head.get("inference-header-content-length")
    if length is not None:
        return body[int(length) :]
    return np.array(json.loads(body)["outputs"][0]["data"], "<f4").tobytes()


class Cases:
    """Maker of requests. name: name of the model."""

    def __init__(self, name: str, chance: random.Random, texts: list[str]) -> None:
        self.name, self.chance, self.texts = name, chance, texts

    def right(self) -> Case:
        text, chance = self.chance.choice(self.texts), self.chance
        if chance.random() < 0.5:
            document: Any = {"model": self.name, "input": text}
            document |= chance.choice([{}, {"encoding_format": "base64"}])
            path, read = "/v1/embeddings", of_openai
        else:
            tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
            output = {"name": "embedding", "parameters": {"binary_data": chance.random() < 0.5}}
            document = {"inputs": [tensor], "outputs": [output]}
            path, read = f"/v2/models/{self.name}/infer", of_v2
        body, more = json.dumps(document, ensure_ascii=chance.random() < 0.5).encode(), ""
        if chance.random() < 0.25:
            body, more = gzip.compress(body), "content-encoding: gzip\r\n"
        return Case(request(path, body, more), text, read)

    def malformed(self) -> Case:
        make = self.chance.choice((self._bytes, self._bytes, self._document, self._transport))
        return make()

    def _bytes(self) -> Case:
        """Make a valid request with bytes changed, removed or inserted."""
        data, chance = bytearray(self.right().data), self.chance
        for _ in range(chance.choice([1, 1, 2, 8, 64])):
            at = chance.randrange(len(data))
            how = chance.randrange(4)
            if how == 0:
                data[at] ^= 1 << chance.randrange(8)
            elif how == 1:
                del data[at : at + chance.randrange(1, 20)]
            elif how == 2:
                data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 20)))
            else:
                data = data[: at + 1]
            data = data or bytearray(b"x")
        return Case(bytes(data), None)

    def _document(self) -> Case:
        chance, infer = self.chance, f"/v2/models/{self.name}/infer"
        tensor: dict[str, Any] = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
        wrong: list[Any] = [None, -1, 1e999, 1 << 70, "", [], {}, [[[]]], True, "\ud800", [[1, 2]]]
        field = chance.choice([*tensor, "parameters"])
        bodies = [
            json.dumps({"inputs": [{**tensor, field: chance.choice(wrong)}]}),
            json.dumps({"inputs": [{**tensor, "shape": [chance.choice([2, 1 << 40, -1, 0])]}]}),
            json.dumps({"inputs": [tensor], "parameters": {"timeout": chance.choice(wrong)}}),
            json.dumps({"inputs": chance.choice(wrong)}),
            "[" * 100_000,
            '{"inputs": ' * 2000,
            "NaN",
            '{"inputs": [{"shape": [1' + "0" * 5000 + "]}]}",
        ]
        openai = {"model": self.name, "input": "a", "encoding_format": "float"}
        name = chance.choice([*openai, "dimensions", "other"])
        if chance.random() < 0.5:
            return Case(request(infer, chance.choice(bodies).encode("utf-8", "replace")), None)
        body = json.dumps({**openai, name: chance.choice(wrong)}).encode()
        return Case(request("/v1/embeddings", body), None)

    def _transport(self) -> Case:
        chance, infer = self.chance, f"/v2/models/{self.name}/infer"
        whole = self.right().data
        cases = [
            Case(whole[: chance.randrange(1, len(whole))], None, leaves=True),
            Case(
                request(infer, gzip.compress(b" " * (64 << 20)), "content-encoding: gzip\r\n"), None
            ),
            Case(request(infer, b"x" * 50, "content-encoding: gzip\r\n"), None),
            Case(request(infer, b"{}", "inference-header-content-length: 99\r\n"), None),
            Case(request(infer, b"{}", "x: " + "y" * 40_000 + "\r\n"), None),
            Case(request(infer, b"{}", "content-length: 7\r\n"), None),
            Case(request(infer, b"zz\r\n", "transfer-encoding: chunked\r\n"), None),
            Case(f"POST {infer} HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n".encode(), None),
            Case(request("/v2/models/..%2f..%2fetc%2fpasswd/infer", b"{}"), None),
            Case(request("/v2/repository/models/../load", b"{}"), None),
            Case(request(f"/v2/models/{self.name}/versions/%00/infer", b"{}"), None),
            Case(bytes(chance.randrange(256) for _ in range(200)) + b"\r\n\r\n", None),
            Case(b"GET / HTTP/9.9\r\n\r\n", None),
            Case(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", None),
        ]
        return chance.choice(cases)


async def reply(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    head = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    body = await reader.readexactly(int(head.get("content-length", 0)))
    return int(lines[0].split(" ", 2)[1]), head, body


async def outcome(port: int, case: Case, expected: dict[str, bytes], alone: Any) -> str:
    """Send a case on a new connection and describe its outcome."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(case.data)
        if case.leaves:
            return "left"
        status, head, body = await asyncio.wait_for(reply(reader), PATIENCE)
    except TimeoutError:
        return "lost: no answer" if case.text is not None else "hung"
    except (OSError, EOFError):
        return "lost: closed" if case.text is not None else "closed"
    finally:
        writer.close()
    if case.text is not None:
        if status != 200 or case.read is None:
            return f"refused {status}"
        return "equal" if case.read(body, head) == expected[case.text] else "wrong"
    if status != 200:
        return str(status)
    return alone(case.data, head, body)


def still_a_request(bundle: Bundle) -> Callable[[bytes, dict[str, str], bytes], str]:
    """Make the check of answers to changed requests that are still valid."""

    def compare(data: bytes, head: dict[str, str], body: bytes) -> str:
        top, _, content = data.partition(b"\r\n\r\n")
        if not top.startswith(b"POST"):
            return "200 of no infer"  # another path that answers, such as /v2
        try:
            length = next(
                int(line.split(b":")[1])
                for line in top.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            content = content[:length]
            content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
            document = json.loads(content)
        except (StopIteration, ValueError, OSError, EOFError):
            return "200 that was not compared"
        if "input" in document:
            text = document["input"]
            texts, read = text if isinstance(text, list) else [text], of_openai
        else:
            texts, read = document["inputs"][0]["data"], of_v2
        if len(texts) != 1 or document.get("outputs", [{"name": "embedding"}])[0].get("name") != (
            "embedding"
        ):
            return "200 that was not compared"
        answer = np.array(bundle.predict(texts)[0]["embedding"], "<f4").tobytes()
        return "equal, though changed" if read(body, head) == answer else "wrong"

    return compare


async def asked(port: int, cases: list[Case], expected: dict[str, bytes], bundle: Bundle) -> Any:
    outcomes: dict[str, Counter[str]] = {"right": Counter(), "malformed": Counter()}
    alone, left = still_a_request(bundle), iter(cases)

    async def connection() -> None:
        for case in left:
            kind = "malformed" if case.text is None else "right"
            outcomes[kind][await outcome(port, case, expected, alone)] += 1

    await asyncio.gather(*(connection() for _ in range(8)))
    return {kind: dict(sorted(counter.items())) for kind, counter in outcomes.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--right", type=int, default=10_000)
    parser.add_argument("--malformed", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = [sys.executable, "-m", "optimizer", "serve", str(args.bundle), "--port", "0"]
    command += ["--max-wait", "60", "--client-seconds", "1"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    line: dict[str, Any] = {}
    port = 0
    while line.get("event") != "ready":
        line = json.loads(server.stderr.readline())
        port = line.get("port", port)
    lines: list[str] = []
    log = threading.Thread(target=lambda: lines.extend(server.stderr or ()))
    log.start()
    try:
        with Bundle(args.bundle) as bundle:
            chance = random.Random(args.seed)
            texts = [" ".join(chance.choices(WORDS, k=chance.randint(1, 20))) for _ in range(500)]
            texts = [text for text in dict.fromkeys(texts) if text.strip()]
            expected = {
                t: np.array(bundle.predict([t])[0]["embedding"], "<f4").tobytes() for t in texts
            }
            make = Cases(str(bundle.manifest["name"]), chance, texts)
            cases = [make.right() for _ in range(args.right)]
            cases += [make.malformed() for _ in range(args.malformed)]
            chance.shuffle(cases)
            asyncio.run(asked(port, [make.right() for _ in range(200)], expected, bundle))
            before = resident(server.pid)
            document = asyncio.run(asked(port, cases, expected, bundle))
            document |= {"seed": args.seed}
            document["resident_mib"] = [before, resident(server.pid)]
    finally:
        server.send_signal(signal.SIGTERM)
        document_exit = server.wait(60)
        log.join(60)
    events = Counter(json.loads(line)["event"] for line in lines if line.startswith("{"))
    document |= {"exit": document_exit, "events": dict(events)}
    document["bugs"] = [line[:500] for line in lines if '"bug"' in line][:5]
    document["other_lines"] = [line[:200] for line in lines if not line.startswith("{")][:5]
    text = json.dumps(document, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    right = set(document["right"]) == {"equal"}
    bad = {"wrong", "hung", "500"} & set(document["malformed"])
    odd = {"bug", "model_failed", "batches_change_answers"} & set(events)
    return int(not right or bool(bad) or bool(odd) or document_exit != 0)


if __name__ == "__main__":
    raise SystemExit(main())
