"""Command `optimize tune-serving`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.commands.serve.load import EXIT, LIMITS, read_lines, with_load
from optimizer.foundation.progress import show


@click.command("tune-serving")
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the settings found, for `optimize serve BUNDLE --settings`.",
)
@with_load
@click.pass_obj
def tune_serving(obj: dict[str, bool], /, bundle: Path, out: Path | None, **options: Any) -> None:
    """Find the best settings of BUNDLE's server.

    The best have the highest request rate within the objectives. Varied are concurrent batches,
    rows per batch and the wait for more rows (text generation: concurrent requests), and the queue
    limit. Each candidate is measured by the search of `optimize load`, on this machine, whose
    processors the client shares with the server. The settings printed are the section `serve:` of a
    recipe; --out writes them as JSON.

    \b
    Examples:
      optimize tune-serving artifacts/minilm-int8/1 --p99-ms 50 --out serve.json
      optimize tune-serving artifacts/smollm2-int4/1 --first-token-p99-ms 500 --between-p99-ms 80

    \b
    Exit code: 0 settings found, 3 no settings meet the objectives at any rate, 4
    inconclusive: runs were too short to decide (--seconds).
    """
    from optimizer.foundation import atomic
    from optimizer.load_test import tuned_server
    from optimizer.load_test.measure import Objectives, Schedule

    limits = {kind: options[name] for kind, name in LIMITS.items() if options[name] is not None}
    if not limits:
        raise click.UsageError("Give an objective, such as --p99-ms 50.")
    server = tuned_server.ServerUnderTest(
        bundle,
        read_lines(options["texts_file"]),
        Schedule(options["seconds"], burst=options["burst"]),
        Objectives(limits, options["max_refused"]),
        options["tokens"],
        options["patience"],
    )
    document = tuned_server.tune(server)
    if out is not None and document["verdict"] == "pass":
        with atomic.explain_disk_errors(out, "--out"):
            atomic.write(out, json.dumps({"serve": document["serve"]}, indent=1).encode() + b"\n")
    show(json.dumps(document, indent=1) if obj["json"] else tuned_server.format_document(document))
    raise SystemExit(EXIT[document["verdict"]])
