"""The command `optimize load`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.foundation.errors import DataError
from optimizer.foundation.progress import show
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


@click.command()
@with_debug_and_json
@click.argument("target", metavar="BUNDLE|URL")
@click.option("--rate", type=RATE, help="Requests a second; absent: the highest is searched.")
@click.option("--seconds", type=SECONDS, default=30.0, show_default=True, help="Of each run.")
@click.option("--burst", type=click.IntRange(1, 10_000), default=1, help="Requests at a time.")
@click.option(
    "--recording", type=click.Path(path_type=Path), help="Come as recorded: seconds, one a line."
)
@click.option("--seed", type=int, default=0, help="Of when requests come.")
@click.option(
    "--texts-file",
    type=click.Path(path_type=Path),
    help="Texts to ask, or paths of images, one per line.",
)
@click.option("--grpc", is_flag=True, help="Ask BUNDLE's server over gRPC.")
@click.option("--model", "name", help="To ask, of a URL grpc://HOST:PORT.")
@click.option("--tokens", type=click.IntRange(1, 4096), default=32, help="To continue a text by.")
@click.option("--p99-ms", type=MS, help="Objective: of the time to the whole answer.")
@click.option("--first-token-p99-ms", type=MS, help="Objective: of the time to the first token.")
@click.option("--between-p99-ms", type=MS, help="Objective: of the time between tokens.")
@click.option("--max-refused", type=click.FloatRange(0, 1), default=0.0, help="Share of requests.")
@click.option("--price-per-hour", type=click.FloatRange(0), help="Of the server's machine.")
@click.option("--patience", type=SECONDS, default=60.0, help="Seconds until an answer is lost.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Sent as a bearer token.")
@click.pass_obj
def load(obj: dict[str, bool], /, target: str, rate: float | None, **options: Any) -> None:
    """Measure a server under load: the one at URL, or BUNDLE's own, started for it.

    Requests come whether or not earlier ones are answered, and each is timed from when it was due.
    Every answer is compared with the answer to the same text asked alone; one that differs, or that
    does not come, fails the test. Without --rate the highest rate is searched at which the
    objectives are met.

    \b
    Examples:
      optimize load artifacts/minilm-int8/1 --rate 50
      optimize load artifacts/minilm-int8/1 --p99-ms 50 --price-per-hour 0.20
      optimize load http://127.0.0.1:8000 --rate 5 --first-token-p99-ms 300 --burst 4
      optimize load grpc://127.0.0.1:8001 --model minilm-int8 --rate 50

    \b
    Exit codes: 0 the objectives are met (or there are none), 3 they are not, 4 inconclusive.
    """
    from optimizer.load_test import measure, report

    limits = {kind: options[name] for kind, name in LIMITS.items() if options[name] is not None}
    if rate is None and not limits:
        raise click.UsageError("Give --rate, or an objective to search for, such as --p99-ms 50.")
    come, lines = _arrivals(options), lines_of(options["texts_file"])
    with ExitStack() as stack:
        client = _client(target, options, stack)
        objectives = measure.Objectives(limits, options["max_refused"])
        document = measure.measure(client, lines, come, rate, objectives)
    best = rate if rate is not None else document["highest_rate"]["met"]
    if options["price_per_hour"] is not None and best:
        document["cost_per_1000"] = options["price_per_hour"] / 3600 / best * 1000
    show(json.dumps(document, indent=1) if obj["json"] else report.text_of(document))
    raise SystemExit(EXIT[document["verdict"]])


def _arrivals(options: Mapping[str, Any]) -> Schedule:
    from optimizer.load_test import arrivals, measure

    recording = options["recording"]
    if recording is not None and options["burst"] > 1:
        raise click.UsageError("Give --burst or --recording, not both.")
    instants = arrivals.read(recording) if recording is not None else ()
    return measure.Schedule(options["seconds"], options["seed"], options["burst"], instants)


def _client(target: str, options: Mapping[str, Any], stack: ExitStack) -> Client:
    """Of the server at a URL, or of a bundle's own, which ends with the stack."""
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
        raise click.UsageError(f"--grpc is of a BUNDLE; of a server give {SCHEME}HOST:PORT.")
    token, patience = _token(options["token_file"]), options["patience"]
    if not grpc:
        if options["name"]:
            raise click.UsageError("--model is of gRPC; over HTTP the server's first is asked.")
        return HttpClient(url, token, options["tokens"], patience)
    if not name:
        raise click.UsageError(f"Give --model: a server at {SCHEME} has no list of its models.")
    return GrpcClient(url, name, token, patience)


def lines_of(file: Path | None) -> list[str]:
    """Raises DataError for a file without any."""
    from optimizer.harness.inputs.lines import texts_of

    lines = [] if file is None else [line for line in texts_of(file) if line.strip()]
    if file is not None and not lines:
        raise DataError(
            "it holds nothing to ask", where=str(file), fix="Give one text or path per line."
        )
    return lines


def _token(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return read(file).decode("utf-8").strip()
    except ValueError as e:
        raise DataError(f"cannot be read ({e})", where=str(file)) from None
