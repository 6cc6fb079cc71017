"""The rows of the table that the page and the terminal show, for every task."""

from __future__ import annotations

from dataclasses import replace

from optimizer.package.report import generation
from optimizer.package.report.comparison import (
    Document,
    Row,
    latency_rows,
    part,
    quality_rows,
    size_rows,
)


def rows(report: Document) -> list[Row]:
    """Quality, latency per batch x sequence, size and memory, each float | quantized | change."""
    if generation.generates(report):
        speed = generation.latency_rows(report) or latency_rows(report)
        others = [
            replace(generation.quality_rows(r)[0], name=f"Perplexity, {name}")
            for name, r in further(report).items()
        ]
        return [*generation.quality_rows(report), *others, *speed, *size_rows(report)]
    others = [
        replace(row, name=f"{row.name}, {name}")
        for name, r in further(report).items()
        for row in quality_rows(r)[:1]
    ]
    return [*quality_rows(report), *others, *latency_rows(report), *size_rows(report)]


def further(report: Document) -> dict[str, Document]:
    """For each further evaluation set, the report as if it were the only one."""
    sets = part(report, "also")
    return {name: {**report, "quality": part(sets, name)} for name in sets}
