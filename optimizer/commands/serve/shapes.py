"""Command `optimize shapes`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import TableFile, with_debug_and_json, with_times
from optimizer.foundation.progress import show
from optimizer.harness.bounds import SEQUENCE


@click.command()
@with_debug_and_json
@click.argument("requests", metavar="FILE|URL")
@click.option("--model", default="", help="Name of the model, where a log has several.")
@click.option(
    "--buckets",
    type=click.IntRange(1, 16),
    default=4,
    show_default=True,
    help="Maximum number of lengths to which rows are padded.",
)
@click.option(
    "--longest",
    type=click.IntRange(1, SEQUENCE),
    help="Tokens of the longest row that must be answered.  [default: the longest of FILE]",
)
@with_times(
    "Table of `optimize measure`, whose times are the cost of a length; without it the number of "
    "tokens is."
)
@click.option(
    "--recording",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the arrival times, for `optimize load --recording`.",
)
@click.pass_obj
def shapes(
    obj: dict[str, bool],
    requests: str,
    model: str,
    buckets: int,
    longest: int | None,
    times: TableFile | None,
    recording: Path | None,
) -> None:
    """Recommend shapes, latency cells and load of a recipe from requests.

    FILE is the log of `optimize serve` (its standard error), JSON lines such as {"lengths": [12,
    40], "time": 1.5}, or the text of /metrics, which URL may name too. Prints a YAML fragment: the
    lengths to which padding costs least, `validate.latency`, and `slo`.

    \b
    Examples:
      optimize serve artifacts/minilm-int8/1 2> access.log
      optimize shapes access.log --buckets 3
      optimize shapes http://127.0.0.1:8000/metrics
      optimize shapes access.log --recording arrivals.txt
    """
    from optimizer.foundation import atomic
    from optimizer.foundation.errors import DataError
    from optimizer.traffic import buckets as bucketing
    from optimizer.traffic import places, recommended
    from optimizer.traffic import requests as traffics

    traffic = traffics.read(places.read(requests), requests, model)
    seen = max(traffic.lengths)
    if longest is not None and longest < seen:
        raise DataError(
            f"{longest} was given, and {requests} has a row of {seen} tokens",
            where="--longest",
            accepted=f"{seen} or more",
        )
    if recording is not None and not traffic.instants:
        raise DataError("it has no arrival times", where=requests, fix="Omit --recording.")
    cost, origin = recommended.choose_cost(traffic, times)
    choices = bucketing.choose(traffic.lengths, cost, buckets, longest or seen)
    document = recommended.build_document(traffic, choices, origin, requests)
    if recording is not None:
        instants = "".join(f"{t - traffic.instants[0]:.3f}\n" for t in traffic.instants)
        with atomic.explain_disk_errors(recording, "--recording"):
            atomic.write(recording, instants.encode())
    show(json.dumps(document, indent=1) if obj["json"] else recommended.format_document(document))
