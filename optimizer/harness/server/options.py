"""The options of serve, read before anything heavy is imported, and the settings they choose.

Each setting is the command line's, else that of the file of --settings, else that of the bundle's
recipe under `serve:`, else the default here. `optimize tune-serving` writes such a file by
measurement: {"serve": {"rows": 16, ...}}, which is also that section of a recipe.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import bounds
from ..errors import BundleError, InputError, MachineError
from ..fields import SERVE
from ..process.niceness import IDLE, NICEST
from ..schema import record
from ..trust.plain_file import read

ANSWER = 64 << 20  # maximum bytes of an answer
VALUES = 1 << 19  # maximum values of a body: 256 rows of 512 tokens in three arrays are 393,216
LARGEST = 1 << 20  # bytes of a settings file
FILE = record({"serve": record({}, SERVE, closed=True)}, closed=True)
RECORDED = "default: the recipe's, else"
CONNECTIONS = 1000  # maximum connections to a server, and calls over gRPC


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the server's options, of the command `serve`, to its parser."""
    add = command.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    add(
        "--port",
        type=bounds.whole(0, 65535),
        default=8000,
        help="0: any that is free; default: %(default)s",
    )
    add(
        "--grpc-port",
        type=bounds.whole(0, 65535),
        help="port of v2 over gRPC, which needs grpcio; default: no gRPC",
    )
    _add_versions(command)
    _add_settings(command)
    add(
        "--batching",
        choices=("exact", "padded", "alone"),
        default="exact",
        help="exact: batch texts where that was measured to change no answer; padded: batch all "
        "texts, and report the changes; alone: no batches",
    )
    add(
        "--timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="default time limit of a request; default: %(default)s",
    )
    add(
        "--cache-mib",
        type=bounds.whole(0, 1 << 20),
        default=0,
        metavar="MIB",
        help="memory of a cache of answers to equal requests; default: no cache",
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
    add("--ask", metavar="TEXT", help="answer this text, print some metrics, and end")


def _add_limits(command: argparse.ArgumentParser) -> None:
    """Add to the parser the server's options that limit the requests of clients."""
    add = command.add_argument_group("limits of a client").add_argument
    add(
        "--max-texts",
        type=bounds.whole(1, bounds.BATCH),
        default=256,
        help="maximum texts per request; default: %(default)s",
    )
    add(
        "--max-body",
        type=bounds.whole(1, 1 << 31),
        default=16 << 20,
        metavar="BYTES",
        help="maximum size of a request's body; default: %(default)s",
    )
    add(
        "--max-values",
        type=bounds.whole(1, 1 << 31),
        default=VALUES,
        help="maximum values of a JSON body, where a list or an object counts as eight; "
        "default: %(default)s",
    )
    add(
        "--max-answer",
        type=bounds.whole(1, 1 << 31),
        default=ANSWER,
        metavar="BYTES",
        help="maximum size of an answer; default: %(default)s",
    )
    add(
        "--client-seconds",
        type=_seconds,
        default=10.0,
        help="maximum seconds to receive a request, and to read 256 KiB of the answer; "
        "default: %(default)s",
    )
    add(
        "--client-connections",
        type=bounds.whole(1, CONNECTIONS),
        default=CONNECTIONS // 2,
        metavar="N",
        help="maximum connections and gRPC calls of one client address; raise it behind a proxy; "
        "default: %(default)s",
    )


def _add_access(command: argparse.ArgumentParser) -> None:
    """Add to the parser the server's options on access: the token, other machines, and names of the
    server."""
    add = command.add_argument_group("access").add_argument
    add("--token-file", type=Path, help="file of a bearer token that clients must send")
    add(
        "--insecure",
        action="store_true",
        help="allow requests of other machines without a token",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name to accept in the Host header; repeatable; default: the names of this "
        "machine on 127.0.0.1, else any",
    )


def _add_settings(command: argparse.ArgumentParser) -> None:
    """Add to the parser the server's options that set the scheduler's limits (Settings)."""
    add = command.add_argument_group("batches and slots").add_argument
    add(
        "--settings",
        type=Path,
        metavar="FILE",
        help="settings that `optimize tune-serving` wrote; other options have precedence",
    )
    add("--rows", type=bounds.whole(1, bounds.BATCH), help=f"maximum rows per batch; {RECORDED} 8")
    add(
        "--slots",
        type=bounds.whole(1, bounds.SLOTS),
        help=f"texts that are generated at once; {RECORDED} 8",
    )
    add(
        "--context",
        type=bounds.whole(0, bounds.SEQUENCE),
        metavar="TOKENS",
        help=f"maximum tokens per text, prompt and answer; {RECORDED} the model's context (0)",
    )
    add(
        "--delay-ms",
        type=bounds.whole(0, bounds.DELAY_MS),
        help=f"milliseconds that the first row of a batch waits for others; {RECORDED} 0",
    )
    add(
        "--workers",
        type=bounds.whole(1, bounds.THREADS),
        help="batches that run at once, each on its share of the threads, where the runtime "
        f"supports it; {RECORDED} 1",
    )
    add(
        "--max-wait",
        type=_seconds,
        metavar="SECONDS",
        help="queue limit under overload, in seconds of waiting; "
        f"{RECORDED} the time of two full batches",
    )


def _add_continued(command: argparse.ArgumentParser) -> None:
    """Add to the parser the server's options for text generation."""
    add = command.add_argument_group("text-generation only").add_argument
    add(
        "--prefix-cache-mib",
        type=bounds.whole(0, 1 << 20),
        default=0,
        metavar="MIB",
        help="memory of a cache of prompt prefixes; default: no cache",
    )
    add(
        "--prompt-lookup",
        type=int,
        choices=bounds.GUESSES,
        default=0,
        help="tokens to guess from the text itself and check in one step, each text by itself: "
        "faster for few clients whose answers repeat their prompts; default: no guesses",
    )


def _add_niceness(command: argparse.ArgumentParser) -> None:
    """Add to the parser the server's option that lowers the priority of the model's threads
    (process/niceness.py)."""
    command.add_argument(
        "--model-nice",
        type=_niceness,
        default=0,
        metavar="N|idle",
        help="niceness of the model's threads (Linux), so that requests are read and refused while "
        "it computes; idle: they run when no other thread of the machine wants a processor, for "
        "two processors or more",
    )


def _add_semantic(command: argparse.ArgumentParser) -> None:
    """Add the options of the semantic cache; a server gets all of them or none."""
    add = command.add_argument_group("cache of answers to similar questions").add_argument
    add(
        "--semantic-cache-mib",
        type=bounds.whole(0, 1 << 20),
        default=0,
        metavar="MIB",
        help="memory of a cache of answers to similar questions, marked x-cache: semantic; "
        "default: no cache",
    )
    add(
        "--semantic-encoder",
        type=Path,
        metavar="BUNDLE",
        help="bundle that embeds questions",
    )
    add(
        "--semantic-pairs",
        type=Path,
        metavar="FILE",
        help="pairs of questions, labelled by whether one answer is right for both; they determine "
        "the threshold of similarity",
    )
    add(
        "--semantic-false-hits",
        type=_share,
        metavar="SHARE",
        help="maximum share of new questions that get the answer of another question",
    )
    add("--semantic-confidence", type=_share, default=0.95, help="default: %(default)s")


def _add_versions(command: argparse.ArgumentParser) -> None:
    """Add to the parser the server's options for several bundles, and for trials of a new
    version."""
    add = command.add_argument_group("several bundles, and trials of a new version").add_argument
    add(
        "--beside",
        type=Path,
        action="append",
        default=[],
        metavar="BUNDLE",
        help="another bundle to serve: another model, or another version of one; repeatable",
    )
    add(
        "--trial",
        type=_share,
        metavar="SHARE",
        help="share of requests that a loaded version answers while it is compared with the old "
        "one, before it replaces it; 0: it is only compared",
    )
    add(
        "--max-differing",
        type=_share,
        metavar="SHARE",
        help="maximum share of different answers that passes a trial",
    )
    add(
        "--same-cosine",
        type=_share,
        help="minimum cosine of two embeddings that count as equal in a trial",
    )
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


@dataclass(frozen=True)
class Settings:
    """Settings of a server's scheduler.

    rows: maximum rows per batch
    delay_ms: milliseconds that the first row of a batch waits for others
    workers: batches that run at once, each on its share of the threads
    slots: texts that are generated at once
    context: maximum tokens per text, prompt and answer; 0 for the model's context
    max_wait: queue limit under overload, in seconds of waiting; None for two full batches
    """

    rows: int = 8
    delay_ms: int = 0
    workers: int = 1
    slots: int = 8
    context: int = 0
    max_wait: float | None = None


def choose_settings(manifest: Mapping[str, Any], args: argparse.Namespace) -> Settings:
    """Return the settings of a bundle's server, in the order of precedence of this module.

    manifest: manifest of the bundle
    args: options of `serve`

    Raises InputError for a --settings file that is not valid.
    """
    sources = [manifest["recipe"].get("serve") or {}, _read(args.settings), vars(args)]
    names = [field.name for field in fields(Settings)]
    values = {
        name: source[name] for source in sources for name in names if source.get(name) is not None
    }
    return Settings(**values)


def _read(file: Path | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    data = read(file, LARGEST)
    try:
        document = json.loads(data)
        FILE(document, "")
    except (ValueError, RecursionError) as e:
        raise InputError(
            f"cannot be read ({e})", where=f"--settings {file}", accepted="a JSON file"
        ) from None
    except BundleError as e:
        raise InputError(e.problem, where=f"{file}: {e.where}", accepted=e.accepted) from None
    return dict(document["serve"])


def check_installed(where: str, packages: Mapping[str, str]) -> None:
    """Raise MachineError if a package that a server's option needs is not installed.

    where: option that needs the packages
    packages: {module: package}
    """
    missing = [package for module, package in packages.items() if not _is_installed(module)]
    if missing:
        raise MachineError(
            f"not installed: {', '.join(missing)}",
            where=where,
            fix=f"pip install {' '.join(missing)}, as requirements-serve.txt of the bundle has it",
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False
