"""Cards and rows of text-generation: nats per token, agreement, time per token."""

from __future__ import annotations

from typing import Any

from optimizer.package.report import plots
from optimizer.package.report.comparison import (
    Document,
    TableEntry,
    TableRow,
    baseline,
    build_cell,
    divide,
    get_part,
    get_parts,
    system,
)
from optimizer.package.report.figures import (
    Writer,
    finite,
    interval,
    ms,
    nats,
    percent,
    plain,
    times,
)
from optimizer.package.report.view import Card, ReportTable, line


def is_generation(report: Document) -> bool:
    """Return True for a report on text generation."""
    return get_part(report, "quality").get("metric") == "perplexity"


def cost(report: Document) -> tuple[Any, list[Any]]:
    """Return for the report (value, [low, high]): nats per token the candidate loses, `difference`
    negated."""
    moved = get_part(get_part(report, "quality"), "difference")
    bounds = moved.get("interval")
    ends = list(bounds) if isinstance(bounds, list | tuple) and len(bounds) == 2 else [None, None]
    return _minus(moved.get("value")), [_minus(ends[1]), _minus(ends[0])]


def _minus(value: Any) -> Any:
    number = finite(value)
    return value if number is None else -number


def quality_rows(report: Document) -> list[TableRow]:
    """Return the report's rows on perplexity and on agreement of predictions and generated text."""
    section = get_part(report, "quality")
    before, after = get_part(section, "baseline"), get_part(section, "candidate")
    value, bounds = cost(report)
    rows = [
        TableRow(
            "Perplexity",
            build_cell(before.get("value"), plain, before.get("interval")),
            build_cell(after.get("value"), plain, after.get("interval")),
            build_cell(value, nats, bounds),
        )
    ]
    figures: list[tuple[str, str, Writer]] = [
        ("KL from float", "kl", plain),
        ("Same next token", "top1", percent),
    ]
    for name, key, write in figures:
        figure = get_part(section, key)
        if figure:
            entry = build_cell(figure.get("value"), write, figure.get("interval"))
            rows.append(TableRow(name, TableEntry(""), entry))
    common = get_part(section, "divergence")
    if common:
        entry = TableEntry(
            f"{plain(common.get('mean'))} tokens", f"of {plain(common.get('new_tokens'))} written"
        )
        rows.append(TableRow("Same text, on average", TableEntry(""), entry))
    return rows


def latency_rows(report: Document) -> list[TableRow]:
    """Return the report's rows per batch x prompt: first token, next token, tokens per second."""
    rows = []
    for cell in get_parts(get_part(report, "speed"), "cells"):
        first = baseline(cell, str(report.get("target", "")))
        both = [get_part(get_part(cell, "systems"), n) if n else {} for n in (first, "candidate")]
        where = f"{plain(cell.get('batch'))} × {plain(cell.get('prompt'))}"
        for key, name, percentiles in (
            ("ttft", "First token", ("p50",)),
            ("inter_token", "Next token", ("p50", "p99")),
        ):
            for p in percentiles:
                before, after = (get_part(s, key) for s in both)
                moved = TableEntry(times(divide(after.get(p), before.get(p))))
                known = get_part(get_part(cell, "ratio"), key)
                if p == "p50" and "median" in known:
                    moved = build_cell(known["median"], times, known.get("interval"))
                a, b = (build_cell(e.get(p), ms, e.get(f"{p}_interval")) for e in (before, after))
                rows.append(TableRow(f"{name} {p}, {where}", a, b, moved))
        rates = [s.get("tokens_per_second") for s in both]
        rows.append(
            TableRow(
                f"Tokens/s, {where}",
                TableEntry(plain(rates[0])),
                TableEntry(plain(rates[1])),
                TableEntry(times(divide(rates[1], rates[0]))),
            )
        )
    return rows


def agreement(section: Document) -> tuple[ReportTable, ...]:
    """Return the report's folded table of KL, equal next tokens and equal texts; () if not
    measured."""
    body: list[tuple[str, str, str]] = []
    figures: list[tuple[str, str, Writer]] = [
        ("KL from float, nats per token", "kl", plain),
        ("Same likeliest next token", "top1", percent),
    ]
    for name, key, write in figures:
        figure = get_part(section, key)
        if figure:
            body.append((name, write(figure.get("value")), interval(figure.get("interval"), write)))
    common = get_part(section, "divergence")
    if common:
        counts = f"{plain(common.get('prompts'))} prompts of {plain(common.get('prompt_tokens'))}"
        counts = f"of {plain(common.get('new_tokens'))}; {counts}"
        body.append(
            (
                f"Tokens before the greedy texts part, {counts}",
                plain(common.get("mean")),
                interval(common.get("interval"), plain),
            )
        )
        body.append(("Greedy texts alike to the end", percent(common.get("identical")), ""))
    title = "Agreement with float"
    lines = tuple(tuple(line(text) for text in row) for row in body)
    return (ReportTable(title, (title, "", "Interval"), lines, (1, 2), fold=title),) if body else ()


def latency(report: Document, recipe: Any) -> tuple[Card, ...]:
    """Return one card of the report per batch x prompt: a chart of the time to the first token, and
    a table."""
    target = str(report.get("target", ""))
    return tuple(
        _latency(cell, target, recipe) for cell in get_parts(get_part(report, "speed"), "cells")
    )


def _latency(cell: Document, target: str, recipe: Any) -> Card:
    where = f"batch {plain(cell.get('batch'))}, prompts of {plain(cell.get('prompt'))} tokens"
    first, title = baseline(cell, target), f"Speed of writing, {where}"
    drawn, body = {}, []
    for name, timings in get_part(cell, "systems").items():
        shown = system(name, recipe)
        start, step = get_part(timings, "ttft"), get_part(timings, "inter_token")
        drawn[shown] = (plots.style(name, first), start)
        texts = (
            shown,
            *(ms(start.get(p)) for p in ("p50", "p99")),
            *(ms(step.get(p)) for p in ("p50", "p95", "p99")),
            plain(timings.get("tokens_per_second")),
        )
        body.append(tuple(line(text) for text in texts))
    heads = ("", "First p50", "First p99", "Next p50", "Next p95", "Next p99", "Tokens/s")
    return Card(
        title,
        f"Every dot is the time to the first token in one of {plain(cell.get('runs'))} "
        f"interleaved rounds; {plain(cell.get('new_tokens'))} tokens were written in "
        "each, and the table has the time from one to the next.",
        plots.latency(drawn, f"First token, {where}"),
        tables=(ReportTable(title, heads, tuple(body), tuple(range(1, 7)), stacked=True),),
    )
