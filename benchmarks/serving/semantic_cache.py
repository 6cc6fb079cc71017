"""Right and false hits of a semantic cache, on questions that did not choose its threshold.

    pip download --no-deps chatterbot-corpus==1.3.3
    python -m benchmarks.serving.semantic_cache ENCODER_BUNDLE
        chatterbot_corpus-1.3.3-py2.py3-none-any.whl [--decoder BUNDLE] [--out FILE]

The questions are the English part of chatterbot-corpus (trivia, small talk; BSD licence). Questions
with the same answer count as one, as do questions that differ only in case or punctuation. They are
split at random into two halves, and each half again: one part is cached, the other is new.

Pairs of different meaning are a new question and a cached one. Pairs of the same meaning are made
by rule (REWORDED), since the corpus has no second wordings, so that right hits are those of small
changes. The threshold is chosen on the pairs of one half, as the server does. On the other half the
benchmark counts new questions that get the answer of a cached one (false hits), and reworded ones
that get their own.

With --decoder a server of that bundle is timed on questions that are new, similar or the same.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.serving.decoder import server
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.errors import InputError
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.server.caches.encoder import QuestionEncoder
from optimizer.harness.server.caches.false_hits import (
    FalseHitLimit,
    QuestionPair,
    Vectors,
    choose_threshold,
    upper_bound,
)
from optimizer.harness.server.caches.semantic import SemanticCache

RATES = (0.005, 0.01, 0.02, 0.05)
CONFIDENCE = 0.95
SIZES = (1000, 5000, 20_000)  # numbers of entries in the cache
ASKED, NEW = 20, 32  # number of questions to the decoder; tokens per answer
REWORDED = (
    lambda q: q.rstrip("?.! ").lower(),
    lambda q: f"Can you tell me: {q}",
    lambda q: q.replace("What is", "What's").replace("Who is", "Who's") + " Thanks.",  # prose: ok
    lambda q: q[: len(q) // 2] + q[len(q) // 2 + 1 :],  # drops a letter
)


def questions(wheel: Path) -> list[str]:
    """Read one question per answer, in the order of the files."""
    by_answer, seen = dict[str, str](), set[str]()
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if "/english/" in n and n.endswith(".yml")]
        for name in sorted(names):
            for turns in yaml.safe_load(archive.read(name))["conversations"]:
                texts = [str(turn).strip() for turn in turns[:2]]
                words = "".join(c for c in texts[0].lower() if c.isalnum() or c == " ")
                if len(texts) == 2 and all(texts) and words not in seen:
                    seen.add(words)
                    by_answer.setdefault(texts[1], texts[0])
    return list(by_answer.values())


def halves(some: Sequence[str], chance: random.Random) -> tuple[list[str], list[str]]:
    mixed = list(some)
    chance.shuffle(mixed)
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]


def labelled(kept: Sequence[str], new: Sequence[str]) -> list[QuestionPair]:
    """Pair each new question with a cached one, and each cached one with its rewording."""
    different = [
        QuestionPair(i, a, b, False) for i, (a, b) in enumerate(zip(new, kept, strict=False))
    ]
    same = [QuestionPair(i, REWORDED[i % len(REWORDED)](q), q, True) for i, q in enumerate(kept)]
    return [*different, *same]


def embedded(encoder: QuestionEncoder, pairs: Sequence[QuestionPair]) -> dict[str, Vectors]:
    vectors = {text: encoder.embed(text) for p in pairs for text in (p.text, p.other)}
    return {text: vector for text, vector in vectors.items() if vector is not None}


def judged(
    pairs: Sequence[QuestionPair], vectors: dict[str, Vectors], threshold: float
) -> dict[str, Any]:
    """Count hits of a cache that holds all cached questions of these pairs."""
    kept = list(dict.fromkeys(p.other for p in pairs))
    matrix = np.stack([vectors[text] for text in kept])
    new = wrong = reworded = right = other = 0
    for pair in pairs:
        alike = matrix @ vectors[pair.text]
        row = int(np.argmax(alike))
        hit = bool(alike[row] > threshold)
        if pair.same:
            reworded += 1
            right += hit and kept[row] == pair.other
            other += hit and kept[row] != pair.other
        else:
            new += 1
            wrong += hit
    return {
        "kept": len(kept),
        "new": new,
        "false_hits": wrong,
        "false_hit_rate": round(wrong / new, 4),
        "at_most": round(upper_bound(wrong, new, CONFIDENCE), 4),
        "reworded": reworded,
        "own_answer": round(right / reworded, 3),
        "anothers_answer": round(other / reworded, 4),
    }


def lookup_ms(width: int) -> dict[str, float]:
    chance, times = np.random.default_rng(0), {}
    for entries in SIZES:
        cache = SemanticCache(1 << 30, entries, 0.99)
        vectors = chance.normal(size=(entries, width)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        for vector in vectors:
            cache.put("d", b"f", vector, 0)
        spent = []
        for vector in vectors[:50]:
            start = time.perf_counter()
            cache.get(b"f", vector)
            spent.append(1000 * (time.perf_counter() - start))
        times[str(entries)] = round(statistics.median(spent), 3)
    return times


def asked(port: int, model: str, question: str) -> tuple[str, float]:
    """Ask a question; return (header x-cache, seconds to the entire answer)."""
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": NEW}
    connection, start = http.client.HTTPConnection("127.0.0.1", port), time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    reply = connection.getresponse()
    document = json.loads(reply.read())
    seconds = time.perf_counter() - start
    connection.close()
    if reply.status != 200:
        raise ValueError(f"{reply.status}: {document}")
    return reply.headers["x-cache"], seconds


def answered(args: argparse.Namespace, pairs: Sequence[QuestionPair], file: Path) -> dict[str, Any]:
    """Time answers in milliseconds by their x-cache header."""
    with file.open("w") as out:
        for p in pairs:
            out.write(json.dumps({"text": p.text, "text_pair": p.other, "same": p.same}) + "\n")
    options = ["--cache-mib", "64", "--semantic-cache-mib", "64"]
    options += ["--semantic-encoder", str(args.encoder), "--semantic-pairs", str(file)]
    options += ["--semantic-false-hits", "0.01"]
    with Bundle(args.decoder) as opened:
        model = str(opened.manifest["name"])
    same = [p for p in pairs if p.same][:ASKED]
    spent: dict[str, list[float]] = {}
    with server(args.decoder, 8, options) as served:
        for question in ("warm up", *[p.other for p in same], *[p.text for p in same] * 2):
            state, seconds = asked(served.port, model, question)
            if question != "warm up":
                spent.setdefault(state, []).append(1000 * seconds)
    return {
        state: {"number": len(some), "p50_ms": round(statistics.median(some), 2)}
        for state, some in spent.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--decoder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chance = random.Random(0)
    every = questions(args.wheel)
    choose, judge = (labelled(*halves(half, chance)) for half in halves(every, chance))
    document: dict[str, Any] = {"machine": describe_machine().to_json(), "questions": len(every)}
    with Bundle(args.encoder) as bundle:
        document["encoder"] = str(bundle.manifest["name"])
        encoder, spent = QuestionEncoder(bundle), list[float]()
        vectors = embedded(encoder, [*choose, *judge])
        for pair in judge[:200]:
            start = time.perf_counter()
            encoder.embed(pair.text)
            spent.append(1000 * (time.perf_counter() - start))
        encoder.close()
    document["encode_ms"] = round(statistics.median(spent), 2)
    document["lookup_ms"] = lookup_ms(len(next(iter(vectors.values()))))
    for rate in RATES:
        try:
            found = choose_threshold(choose, vectors, FalseHitLimit(rate, CONFIDENCE), "pairs")
        except InputError as e:
            document[f"rate {rate:g}"] = {"refused": str(e)}
            continue
        held_out = judged(judge, vectors, found.threshold)
        document[f"rate {rate:g}"] = {"chosen": asdict(found), "held_out": held_out}
    if args.decoder:
        file = (args.out or Path("semantic_cache")).with_suffix(".pairs.jsonl")
        document["answered"] = answered(args, choose, file)
        file.unlink()
    text = json.dumps(document, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
