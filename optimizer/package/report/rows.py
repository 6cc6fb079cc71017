"""Rows of the comparison table on the page and in the terminal, for every task."""

from __future__ import annotations

from dataclasses import replace

from optimizer.package.report.cards import generation
from optimizer.package.report.cards.timed_sizes import gain_rows
from optimizer.package.report.comparison import (
    Document,
    TableEntry,
    TableRow,
    get_part,
    latency_rows,
    quality_rows,
    size_rows,
)
from optimizer.package.report.figures import times, whole


def build_rows(report: Document) -> list[TableRow]:
    """Return the report's rows float | quantized | change: quality, latency per batch x sequence,
    size, memory; for a reduced model also its speedup and parameters."""
    return [*_answering(report), *gain_rows(report), *_smaller(report)]


def _answering(report: Document) -> list[TableRow]:
    if generation.is_generation(report):
        speed = generation.latency_rows(report) or latency_rows(report)
        others = [
            replace(generation.quality_rows(r)[0], name=f"Perplexity, {name}")
            for name, r in list_further_reports(report).items()
        ]
        return [*generation.quality_rows(report), *others, *speed, *size_rows(report)]
    others = [
        replace(row, name=f"{row.name}, {name}")
        for name, r in list_further_reports(report).items()
        for row in quality_rows(r)[:1]
    ]
    return [*quality_rows(report), *others, *latency_rows(report), *size_rows(report)]


def _smaller(report: Document) -> list[TableRow]:
    """Return the row of the report's table on the number of parameters of a reduced model; [] for
    other models."""
    reduced = get_part(report, "reduced")
    if not reduced:
        return []
    before, after = reduced["weights"]["all"]
    names = {"blocks": "blocks", "ffn": "neurons", "heads": "key/value heads", "width": "wide"}
    names |= {"hidden": "channels"}
    sizes = [(names[kind], pair) for kind, pair in reduced["sizes"].items() if pair[0] != pair[1]]
    there = ", ".join(f"{pair[0]} {name}" for name, pair in sizes)
    kept = ", ".join(f"{pair[1]} {name}" for name, pair in sizes)
    ratio = TableEntry(times(after / before))
    return [
        TableRow(
            "Parameters", TableEntry(whole(before), there), TableEntry(whole(after), kept), ratio
        )
    ]


def list_further_reports(report: Document) -> dict[str, Document]:
    """Return {further evaluation set, or "adapter NAME": the report with its section of quality as
    "quality"}."""
    also, adapters = get_part(report, "also"), get_part(report, "adapters")
    sections = {**also, **{f"adapter {name}": section for name, section in adapters.items()}}
    return {name: {**report, "quality": get_part(sections, name)} for name in sections}
