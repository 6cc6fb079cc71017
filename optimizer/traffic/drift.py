"""Compare a server's requests with the rows on which its bundle was calibrated and judged.

The bundle's report has
    sense.texts.PLACE.lengths   {upper bound of tokens: rows} of a data set, in the server's bins
    quality.labels              {label: answers} of the model that ships, on validate.data
and /metrics of its server optimize_row_tokens and optimize_answers_total.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from optimizer.foundation.errors import DataError, InputError
from optimizer.foundation.verdicts import worst
from optimizer.traffic import two_samples
from optimizer.traffic.exposition import Exposition, Labels
from optimizer.traffic.requests import LENGTHS

ANSWERS = "optimize_answers_total"
PLACES = ("validate.data", "calibrate")
Compared = tuple[str, Mapping[Any, int], Mapping[Any, int], bool]
"""(what is compared, of the server, of the bundle, bins are ordered)"""


def build_document(
    manifest: Mapping[str, Any],
    report: Mapping[str, Any],
    metrics: Exposition,
    confidence: float,
    least: float,
) -> dict[str, Any]:
    """Compare the lengths and labels of a server's requests with the bundle's data; return the
    document of `--json`.

    manifest, report: the bundle's manifest, and its report of one target
    metrics: samples of the server's /metrics
    confidence: 1 - the probability that any comparison reports a drift where there is none
    least: least distance that counts as a drift

    Raises DataError if the bundle has no record of its rows, or the server none of this bundle's
    answers; InputError for a confidence too near 1.
    """
    of_model = metrics.of_model(LENGTHS, manifest["name"], manifest["version"])
    compared = list(_compared(report, metrics, of_model))
    if not compared:
        raise DataError(
            f"{metrics.where} has no answer of {manifest['name']} {manifest['version']} to compare",
            where="drift",
            accepted="a bundle of texts (not of text generation) or of labels, and a server that "
            "has answered requests to it",
            fix="If the bundle was made by an earlier version, make it again: optimize RECIPE.",
        )
    alpha = (1 - confidence) / len(compared)
    if alpha < two_samples.SMALLEST:
        raise InputError(
            f"{confidence:g} is more than {two_samples.DIVISIONS:,} random divisions can show",
            where="--confidence",
            accepted=f"up to {1 - len(compared) * two_samples.SMALLEST:g}",
        )
    results = []
    for name, served, recorded, ordered in compared:
        one = two_samples.compare(served, recorded, ordered=ordered, alpha=alpha, least=least)
        sizes = {"server": sum(served.values()), "bundle": sum(recorded.values())}
        results.append({"of": name, **vars(one), "rows": sizes, "most": _most(served, recorded)})
    verdict = worst(result["verdict"] for result in results)
    return {"verdict": verdict, "alpha": alpha, "least": least, "compared": results}


def _compared(
    report: Mapping[str, Any], metrics: Exposition, of_model: Labels
) -> Iterator[Compared]:
    """Yield (name, server's histogram, bundle's histogram of lengths or labels, True for ordered
    bins) to compare."""
    texts = (report.get("sense") or {}).get("texts", {})
    lengths = {int(n): count for n, count in metrics.counts(LENGTHS, of_model).items()}
    for place in PLACES:
        recorded = texts.get(place, {}).get("lengths")
        if recorded and lengths:
            bins = {int(bound): count for bound, count in recorded.items()}
            _check_bounds(bins, metrics, of_model)
            yield f"tokens per row, {place}", lengths, bins, True
    labels = metrics.count_by_label(ANSWERS, "label", of_model)
    recorded = (report.get("quality") or {}).get("labels")
    if labels and recorded:
        yield "labels of answers, validate.data", labels, recorded, False


def _check_bounds(bins: Mapping[int, int], metrics: Exposition, of_model: Labels) -> None:
    if other := sorted(set(bins) - set(metrics.bounds(LENGTHS, of_model))):
        raise DataError(
            f"{LENGTHS} has no bound {other[0]}, which the bundle's report has",
            where=metrics.where,
            accepted="/metrics of a server of this bundle",
        )


def _most(served: Mapping[Any, int], recorded: Mapping[Any, int]) -> dict[str, Any]:
    """Find how users' requests drifted most from the bundle's data: {"bin", "server", "bundle"},
    the bin whose shares of rows differ most, and both shares."""
    shares = [{k: n / sum(side.values()) for k, n in side.items()} for side in (served, recorded)]
    bin_ = max({*served, *recorded}, key=lambda k: abs(shares[0].get(k, 0) - shares[1].get(k, 0)))
    return {"bin": bin_, "server": shares[0].get(bin_, 0.0), "bundle": shares[1].get(bin_, 0.0)}


WORDS = {"fail": "drift", "pass": "no drift", "inconclusive": "too few rows to tell"}


def format_document(document: Mapping[str, Any]) -> str:
    """Write how the requests drifted: a line per comparison, and the verdict."""
    lines = [_line(result, document["least"]) for result in document["compared"]]
    return "\n".join([*lines, f"drift: {document['verdict']}"])


def _line(result: Mapping[str, Any], least: float) -> str:
    most, rows = result["most"], result["rows"]
    line = (
        f"{result['of']}: {WORDS[result['verdict']]}: distance {result['distance']:.3f} (a drift "
        f"from {least:g}), p {result['p']:.4f}; {rows['server']:,} of the server, "
        f"{rows['bundle']:,} of the bundle; most at {most['bin']}: {most['server']:.1%} instead of "
        f"{most['bundle']:.1%}"
    )
    if result["verdict"] != "inconclusive":
        return line
    if result["needed"] is None:
        return f"{line}. The bundle was judged on too few rows for any number of answers"
    return f"{line}. About {result['needed']:,} answers would decide"
