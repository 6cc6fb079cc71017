"""The command `optimize tune-serving`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.commands.serve.load import EXIT, LIMITS, MS, SECONDS, lines_of
from optimizer.foundation.progress import show


@click.command("tune-serving")
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the settings here, for `optimize serve BUNDLE --settings`.",
)
@click.option("--seconds", type=SECONDS, default=30.0, show_default=True, help="Of each run.")
@click.option("--burst", type=click.IntRange(1, 10_000), default=1, help="Requests at a time.")
@click.option(
    "--texts-file",
    type=click.Path(path_type=Path),
    help="Texts to ask, or paths of images, one per line.",
)
@click.option("--tokens", type=click.IntRange(1, 4096), default=32, help="To continue a text by.")
@click.option("--p99-ms", type=MS, help="Objective: of the time to the whole answer.")
@click.option("--first-token-p99-ms", type=MS, help="Objective: of the time to the first token.")
@click.option("--between-p99-ms", type=MS, help="Objective: of the time between tokens.")
@click.option("--max-refused", type=click.FloatRange(0, 1), default=0.0, help="Share of requests.")
@click.option("--patience", type=SECONDS, default=60.0, help="Seconds until an answer is lost.")
@click.pass_obj
def tune_serving(obj: dict[str, bool], /, bundle: Path, out: Path | None, **options: Any) -> None:
    """Find the settings with which BUNDLE's server carries most requests within the objectives:
    batches at once, their rows and how long one waits for more (of a model that continues texts:
    how many at once), and how long requests may wait where too many come.

    Each is measured by the search for the highest rate that `optimize load` is, on this machine,
    whose processors the client shares with the server. The settings printed are the section
    `serve:` of a recipe; --out writes them as JSON.

    \b
    Examples:
      optimize tune-serving artifacts/minilm-int8/1 --p99-ms 50 --out serve.json
      optimize tune-serving artifacts/smollm2-int4/1 --first-token-p99-ms 500 --between-p99-ms 80

    \b
    Exit codes: 0 found, 3 no settings meet the objectives at any rate.
    """
    from optimizer.foundation import atomic
    from optimizer.load_test import tuned_server
    from optimizer.load_test.measure import Objectives, Schedule

    limits = {kind: options[name] for kind, name in LIMITS.items() if options[name] is not None}
    if not limits:
        raise click.UsageError("Give an objective, such as --p99-ms 50.")
    server = tuned_server.TunedServer(
        bundle,
        lines_of(options["texts_file"]),
        Schedule(options["seconds"], burst=options["burst"]),
        Objectives(limits, options["max_refused"]),
        options["tokens"],
        options["patience"],
    )
    document = tuned_server.tune(server)
    if out is not None and document["verdict"] == "pass":
        with atomic.disk_errors_explained(out, "--out"):
            atomic.write(out, json.dumps({"serve": document["serve"]}, indent=1).encode() + b"\n")
    show(json.dumps(document, indent=1) if obj["json"] else tuned_server.text_of(document))
    raise SystemExit(EXIT[document["verdict"]])
