"""The options of serve, which are read before anything heavy is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import bounds
from ..process.niceness import IDLE, NICEST

ANSWER = 64 << 20  # bytes of an answer
VALUES = 1 << 19  # of a body: 256 rows of 512 tokens in three arrays are 393,216
RECORDED = "default: the recipe's, else"
CONNECTIONS = 1000  # to a server at once; and calls over gRPC


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of serve."""
    add = command.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    add("--port", type=bounds.whole(0, 65535), default=8000, help="0: any that is free")
    add(
        "--grpc-port",
        type=bounds.whole(0, 65535),
        help="v2 over gRPC as well, where grpcio is installed; default: not at all",
    )
    _add_versions(command)
    _add_settings(command)
    add(
        "--batching",
        choices=("exact", "padded", "alone"),
        default="exact",
        help="exact: texts share a batch, or a step, where that was measured to change no answer; "
        "padded: whatever it changes, which is measured and said; alone: never",
    )
    add(
        "--timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="of a request that says none",
    )
    add(
        "--cache-mib",
        type=bounds.whole(0, 1 << 20),
        default=0,
        metavar="MIB",
        help="of answers that are kept for requests that come again; default: none",
    )
    _add_continued(command)
    _add_semantic(command)
    _add_limits(command)
    _add_niceness(command)
    _add_access(command)
    add(
        "--otlp-endpoint",
        metavar="URL",
        help="send spans of requests to this collector (OTLP/HTTP, such as "
        "http://127.0.0.1:4318/v1/traces); default: none are made",
    )
    add("--ask", metavar="TEXT", help="start, answer this, show some metrics, and end")
    add("--plain", action="store_true", help="the standard library's HTTP, also where uvicorn is")


def _add_limits(command: argparse.ArgumentParser) -> None:
    """Of what clients may ask, and how fast they must."""
    add = command.add_argument
    add(
        "--max-texts",
        type=bounds.whole(1, bounds.BATCH),
        default=256,
        help="most texts in one request",
    )
    add("--max-body", type=bounds.whole(1, 1 << 31), default=16 << 20, metavar="BYTES")
    add(
        "--max-values",
        type=bounds.whole(1, 1 << 31),
        default=VALUES,
        help="of a body in JSON, where a list or an object counts as eight; default: %(default)s",
    )
    add("--max-answer", type=bounds.whole(1, 1 << 31), default=ANSWER, metavar="BYTES")
    add(
        "--client-seconds",
        type=_seconds,
        default=10.0,
        help="seconds to send a request, and to read 256 KiB of the answer",
    )
    add(
        "--client-connections",
        type=bounds.whole(1, CONNECTIONS),
        default=CONNECTIONS // 2,
        metavar="N",
        help="most connections, and gRPC calls, of one client address; more where a proxy stands "
        "before the server; default: %(default)s",
    )


def _add_access(command: argparse.ArgumentParser) -> None:
    """Of who may ask."""
    add = command.add_argument
    add("--token-file", type=Path, help="clients must send its content as a bearer token")
    add(
        "--insecure",
        action="store_true",
        help="listen where other machines reach it, without a token",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name to accept in the Host header; repeatable; default: on 127.0.0.1 the "
        "names of this machine, elsewhere any",
    )


def _add_settings(command: argparse.ArgumentParser) -> None:
    """Of settings.py, which says what holds where one is not given."""
    add = command.add_argument
    add(
        "--settings",
        type=Path,
        metavar="FILE",
        help="what `optimize tune-serving` found; an option given beside it has precedence",
    )
    add("--rows", type=bounds.whole(1, bounds.BATCH), help=f"of a batch, at most; {RECORDED}, 8")
    add(
        "--slots",
        type=bounds.whole(1, bounds.SLOTS),
        help=f"texts that are continued at once; {RECORDED}, 8",
    )
    add(
        "--context",
        type=bounds.whole(0, bounds.SEQUENCE),
        metavar="TOKENS",
        help=f"of each of them, prompt and answer; {RECORDED}, the model's own (0)",
    )
    add(
        "--delay-ms",
        type=bounds.whole(0, bounds.DELAY_MS),
        help=f"wait so long for more rows; {RECORDED}, 0",
    )
    add(
        "--workers",
        type=bounds.whole(1, bounds.THREADS),
        help="batches that run at once, each on its share of the threads, where the runtime can; "
        f"{RECORDED}, 1",
    )
    add(
        "--max-wait",
        type=_seconds,
        metavar="SECONDS",
        help="that requests may wait where more come than are answered; "
        f"{RECORDED}, the time of two full batches",
    )


def _add_continued(command: argparse.ArgumentParser) -> None:
    """Of texts that are continued alone."""
    add = command.add_argument
    add(
        "--prefix-cache-mib",
        type=bounds.whole(0, 1 << 20),
        default=0,
        metavar="MIB",
        help="of what was read of prompts, for those that begin alike; default: none",
    )
    add(
        "--prompt-lookup",
        type=int,
        choices=bounds.GUESSES,
        default=0,
        help="guess so many tokens of a text from the text itself and check them in one step, each "
        "text by itself: faster for few clients whose answers repeat what they sent; default: none",
    )


def _add_niceness(command: argparse.ArgumentParser) -> None:
    """Of process/niceness.py."""
    command.add_argument(
        "--model-nice",
        type=_niceness,
        default=0,
        metavar="N|idle",
        help="how much nicer the model's threads are than the server's (Linux), so that requests "
        "are read and refused while it computes; idle: they have what nothing else wants, for two "
        "processors or more; the machine's other programs go first, too",
    )


def _add_semantic(command: argparse.ArgumentParser) -> None:
    """Of answers that are given to other questions than their own: all of these, or none."""
    add = command.add_argument
    add(
        "--semantic-cache-mib",
        type=bounds.whole(0, 1 << 20),
        default=0,
        metavar="MIB",
        help="of answers to questions that are given to those which are alike, and marked "
        "(x-cache: semantic); default: none",
    )
    add("--semantic-encoder", type=Path, metavar="BUNDLE", help="whose embeddings say how alike")
    add(
        "--semantic-pairs",
        type=Path,
        metavar="FILE",
        help="pairs of questions, labelled by whether one answer is right for both, from which it "
        "follows how alike is enough",
    )
    add(
        "--semantic-false-hits",
        type=_share,
        metavar="SHARE",
        help="of new questions, that may be given another's answer, at most",
    )
    add("--semantic-confidence", type=_share, default=0.95, help="default: %(default)s")


def _add_versions(command: argparse.ArgumentParser) -> None:
    """Of several bundles, and of how a new version takes the old one's place."""
    add = command.add_argument
    add(
        "--beside",
        type=Path,
        action="append",
        default=[],
        metavar="BUNDLE",
        help="serve this one too: another model, or another version of one; repeatable",
    )
    add(
        "--trial",
        type=_share,
        metavar="SHARE",
        help="a version that is loaded answers so much of the requests, and is compared with the "
        "old one, before it takes its place; 0: is compared alone",
    )
    add("--max-differing", type=_share, metavar="SHARE", help="of requests, that passes a trial")
    add("--same-cosine", type=_share, help="of two embeddings that count as one in a trial")
    add("--trial-confidence", type=_share, default=0.95, help="default: %(default)s")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} was given. Accepted: from 0, below 1")
    return share


def _niceness(text: str) -> int:
    return IDLE if text == "idle" else bounds.whole(0, NICEST)(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= bounds.WAIT:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} was given. Accepted: seconds up to 86400")
    return seconds
