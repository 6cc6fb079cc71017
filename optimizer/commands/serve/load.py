"""Command `optimize load`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimizer.commands.options import F, with_debug_and_json, with_price
from optimizer.foundation.errors import DataError
from optimizer.foundation.progress import say, show
from optimizer.harness.trust.plain_file import read

if TYPE_CHECKING:
    from optimizer.load_test.measure import Schedule
    from optimizer.load_test.open_loop import Client

EXIT = {"pass": 0, "fail": 3, "inconclusive": 4}
SECONDS = click.FloatRange(0.1, 86_400)
RATE = click.FloatRange(0.01, 100_000)
MS = click.FloatRange(0, 1e9, min_open=True)
LIMITS = {
    "latency": "p99_ms",
    "first_token": "first_token_p99_ms",
    "between": "between_p99_ms",
}


OPTIONS = (
    click.option(
        "--seconds", type=SECONDS, default=30.0, show_default=True, help="Seconds per run."
    ),
    click.option(
        "--burst",
        type=click.IntRange(1, 10_000),
        default=1,
        help="Requests sent at the same instant.",
    ),
    click.option(
        "--texts-file",
        type=click.Path(path_type=Path),
        help="File of texts to send, or of paths of images, one per line.",
    ),
    click.option(
        "--tokens", type=click.IntRange(1, 4096), default=32, help="Tokens to generate per request."
    ),
    click.option("--p99-ms", type=MS, help="Objective: limit of the time to the complete answer."),
    click.option(
        "--first-token-p99-ms", type=MS, help="Objective: limit of the time to the first token."
    ),
    click.option("--between-p99-ms", type=MS, help="Objective: limit of the time between tokens."),
    click.option(
        "--max-refused",
        type=click.FloatRange(0, 1),
        default=0.0,
        help="Objective: maximum share of requests refused.",
    ),
    click.option("--patience", type=SECONDS, default=60.0, help="Request timeout in seconds."),
)
"""Options of `load` and `tune-serving`."""


def with_load(command: F) -> F:
    """Add the options of `optimize load` (OPTIONS) to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command()
@with_debug_and_json
@click.argument("target", metavar="BUNDLE|URL")
@click.option("--rate", type=RATE, help="Requests per second.  [default: search for the highest]")
@with_load
@click.option(
    "--recording",
    type=click.Path(path_type=Path),
    help="File of recorded arrival times in seconds, one per line; requests come at their "
    "intervals.",
)
@click.option("--seed", type=int, default=0, help="Seed of the arrival times.")
@click.option("--grpc", is_flag=True, help="Use gRPC for BUNDLE's server.")
@click.option("--model", "name", help="Name of the model at a URL grpc://HOST:PORT.")
@with_price("Price of the server's machine, for the cost per 1,000 requests.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="File with a bearer token to send."
)
@click.pass_obj
def load(obj: dict[str, bool], /, target: str, rate: float | None, **options: Any) -> None:
    """Test a server under load.

    The server is the one at URL, or one started from BUNDLE. Requests are sent whether or not
    earlier ones were answered, and each is timed from its due time. Every answer is compared with
    the answer to the same input sent alone; a different or missing one fails the test. Without
    --rate, search for the highest rate that meets the objectives.

    \b
    Examples:
      optimize load artifacts/minilm-int8/1 --rate 50
      optimize load artifacts/minilm-int8/1 --p99-ms 50 --price-per-hour 0.20
      optimize load http://127.0.0.1:8000 --rate 5 --first-token-p99-ms 300 --burst 4
      optimize load grpc://127.0.0.1:8001 --model minilm-int8 --rate 50

    \b
    Exit code: 0 the objectives are met (or there are none), 3 they are not, 4 inconclusive.
    """
    from optimizer.foundation.process import busy
    from optimizer.load_test import measure, report

    limits = {kind: options[name] for kind, name in LIMITS.items() if options[name] is not None}
    if rate is None and not limits:
        raise click.UsageError("Give --rate, or an objective for the search, such as --p99-ms 50.")
    come, lines = _arrivals(options), read_lines(options["texts_file"])
    if busy_with := busy.describe():
        say(f"load: this machine is busy ({busy_with}); a quiet one answers a higher rate")
    with ExitStack() as stack:
        client = _client(target, options, stack)
        objectives = measure.Objectives(limits, options["max_refused"])
        document = measure.measure(client, lines, come, rate, objectives)
    best = rate if rate is not None else document["highest_rate"]["met"]
    if options["price"] is not None and best:
        document["cost_per_1000"] = options["price"] / 3600 / best * 1000
    show(json.dumps(document, indent=1) if obj["json"] else report.format_document(document))
    raise SystemExit(EXIT[document["verdict"]])


def _arrivals(options: Mapping[str, Any]) -> Schedule:
    from optimizer.load_test import arrivals, measure

    recording = options["recording"]
    if recording is not None and options["burst"] > 1:
        raise click.UsageError("Give --burst or --recording, not both.")
    instants = arrivals.read(recording) if recording is not None else ()
    return measure.Schedule(options["seconds"], options["seed"], options["burst"], instants)


def _client(target: str, options: Mapping[str, Any], stack: ExitStack) -> Client:
    """Make the client of `optimize load` for the server at a URL, or for a bundle's server, which
    `stack` ends."""
    from optimizer.load_test.grpc_client import SCHEME, GrpcClient
    from optimizer.load_test.http_client import HttpClient
    from optimizer.load_test.server import run_server
    from optimizer.publish.address import refuse_credentials

    refuse_credentials(target, "URL", "A bearer token is read from a file: --token-file FILE.")
    url, name, grpc = target, options["name"], options["grpc"] or target.startswith(SCHEME)
    if "://" not in target:
        arguments = ["--grpc-port", "0"] if grpc else []
        server = stack.enter_context(run_server(Path(target), arguments))
        url, name = (server.grpc if grpc else server.url), name or server.name
    elif grpc and not target.startswith(SCHEME):
        raise click.UsageError(f"--grpc is for a BUNDLE; for a server give {SCHEME}HOST:PORT.")
    token, patience = _token(options["token_file"]), options["patience"]
    if not grpc:
        if options["name"]:
            raise click.UsageError(
                "--model is for gRPC; over HTTP the server's first model is used."
            )
        return HttpClient(url, token, options["tokens"], patience)
    if not name:
        raise click.UsageError(f"Give --model: a server at {SCHEME} cannot list its models.")
    return GrpcClient(url, name, token, patience)


def read_lines(file: Path | None) -> list[str]:
    """Read the inputs of `optimize load` from a file: its lines that are not blank; [] for None.
    Raises DataError for a blank file."""
    from optimizer.harness.inputs.lines import read_lines

    lines = [] if file is None else [line for line in read_lines(file) if line.strip()]
    if file is not None and not lines:
        raise DataError(
            "the file has no text or path", where=str(file), fix="Give one text or path per line."
        )
    return lines


def _token(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return read(file).decode("utf-8").strip()
    except ValueError as e:
        raise DataError(f"cannot be read ({e})", where=str(file)) from None
