"""Command `optimize drift`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import FiniteRange, with_debug_and_json
from optimizer.foundation.progress import show

EXIT = {"pass": 0, "fail": 3, "inconclusive": 4}


@click.command()
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--metrics", required=True, metavar="FILE|URL", help="Text of /metrics of BUNDLE's server."
)
@click.option(
    "--confidence",
    type=FiniteRange(0.5, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="1 - the probability of a drift where there is none.",
)
@click.option(
    "--least",
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    default=0.1,
    show_default=True,
    help="Least distance of two distributions that is a drift; the default is a choice.",
)
@click.pass_obj
def drift(
    obj: dict[str, bool], bundle: Path, metrics: str, confidence: float, least: float
) -> None:
    """Compare a server's requests with the rows that BUNDLE was calibrated and judged on.

    Compared are the tokens per row, and the labels of the answers, each by a permutation test. A
    distance is the largest difference of cumulative shares of lengths, and half the sum of the
    differences of the shares of labels. A server counts from its start.

    \b
    Examples:
      optimize drift artifacts/minilm-int8/1 --metrics http://127.0.0.1:8000/metrics
      optimize drift artifacts/minilm-int8/1 --metrics metrics.txt --least 0.05

    \b
    Exit code: 0 no drift, 3 drift, 4 too few rows to tell: says how many would.
    """
    from optimizer.harness.bundle.manifest import read_manifest, read_reports
    from optimizer.traffic import drift as drifting
    from optimizer.traffic import places
    from optimizer.traffic.exposition import Exposition

    manifest = read_manifest(bundle)
    report = read_reports(bundle, manifest)[0]
    exposition = Exposition.parse(places.read(metrics), metrics)
    document = drifting.build_document(manifest, report, exposition, confidence, least)
    show(json.dumps(document, indent=1) if obj["json"] else drifting.format_document(document))
    raise SystemExit(EXIT[document["verdict"]])
