"""Cards of one target, drawn by templates/card.html."""

from __future__ import annotations

from typing import Any

from optimizer.package.report import plots
from optimizer.package.report.cards import generation
from optimizer.package.report.comparison import (
    SYSTEMS,
    TORCH,
    Document,
    TableEntry,
    TableRow,
    baseline,
    explain_missing,
    format_length,
    get_part,
    get_parts,
    name_candidate,
    paired_note,
    sort_gates,
    system,
)
from optimizer.package.report.figures import (
    NOT_MEASURED,
    change,
    error,
    finite,
    interval,
    is_broken,
    level,
    ms,
    nats,
    plain,
    whole,
)
from optimizer.package.report.rows import build_rows
from optimizer.package.report.view import (
    Card,
    Line,
    Paragraph,
    ReportTable,
    Span,
    badge,
    figure,
    figures,
    line,
    missing,
    not_drawn,
    small,
)

WORST = 3  # modules marked in the per-layer chart
AS_A_TABLE = "As a table"


def build_unmeasured_card(title: str, what: str, report: Document, section: str) -> Card:
    """Return the report's card of an unmeasured section, with the reason; what: subject, e.g.
    "Quality"."""
    return Card(title, paragraphs=(missing(what, explain_missing(report, section)),))


def comparison(report: Document, recipe: Any) -> Card:
    """Return the report's card with the table float | quantized | change (report/rows.py)."""
    name = name_candidate(recipe)
    examples = get_part(report, "quality").get("examples")
    level_of = finite(get_part(report, "quality").get("confidence"))
    hint = "Times are end to end: text in, answer out."
    kind = "examples that both models answered"
    if generation.is_generation(report):
        hint, kind = "Speed by batch × tokens of prompt.", "windows of held-out text"
    if examples is not None:
        hint += f" Quality on {whole(examples)} {kind}"
        hint += f", intervals at {100 * level_of:.4g} % confidence." if level_of else "."
    hint = f"{hint} {paired_note(report)}".rstrip()
    title = f"Float against {name}"
    heads = ("", "Float", name[0].upper() + name[1:], "Change")
    body = tuple(_compared(row) for row in build_rows(report))
    return Card(title, hint, tables=(ReportTable(title, heads, body, (1, 2, 3), stacked=True),))


def _compared(row: TableRow) -> tuple[Line, ...]:
    if row.unmeasured:
        return line(row.name), line(figure(row.before.text), ": ", row.before.note)
    return line(row.name), *(_write(e) for e in (row.before, row.after, row.change))


def _write(entry: TableEntry) -> Line:
    return line(figure(entry.text), *small(entry.note))


def quality(report: Document, recipe: Any, name: str = "") -> Card:
    """Return the report's card on the quality difference and margin; name: further evaluation set
    or adapter (rows.list_further_reports), or ""."""
    section = get_part(report, "quality")
    on = "with" if section.get("data") else "on"  # an adapter's section names its data
    title = f"Is {name_candidate(recipe)} as good as float" + (f" {on} {name}?" if name else "?")
    if not section.get("metric"):
        return build_unmeasured_card(title, "Quality", report, "quality")
    metric = str(section["metric"])
    what, moved, write = metric, get_part(section, "difference"), change(metric)
    if generation.is_generation(report):
        what, write = "the log-likelihood of held-out text", nats
    value, margin = finite(moved.get("value")), finite(section.get("margin"))
    bounds = moved.get("interval")
    ends = [finite(b) for b in bounds] if isinstance(bounds, list | tuple) else []
    hint = f"Change of {what}. The gate passes when the whole interval lies right of the red line."
    if section.get("report_only"):
        hint = f"Change of {what}, reported only: no gate follows from it."
    chart, paragraphs = None, []
    if value is None or margin is None or len(ends) != 2 or None in ends:
        text = line(
            "No picture: ",
            figure(write(moved.get("value"))),
            ", interval ",
            figure(interval(bounds, write) or NOT_MEASURED),
            ", margin ",
            figure(write(section.get("margin"))),
        )
        paragraphs.append(Paragraph(text, "missing"))
    else:
        low, high = (e for e in ends if e is not None)
        chart = plots.difference(value, (low, high), margin, write, f"Change of {what}")
    if section.get("needed") is not None:
        paragraphs.append(Paragraph(line(f"{whole(section['needed'])} examples would decide it.")))
    if section.get("note"):
        paragraphs.append(Paragraph(line(str(section["note"])), "hint"))
    place = f"validate.also.{name}.data" if name else "validate.data"
    place = str(section.get("data") or place)
    paragraphs += [Paragraph(line(text), "hint") for text in _rows_judged(report, place, name)]
    tables = (*_cosines(section), *generation.agreement(section))
    return Card(title, hint, chart, paragraphs=tuple(paragraphs), tables=tables)


def _rows_judged(report: Document, place: str, name: str) -> list[str]:
    """Return the report's sentences on rows also used for fitting, and on rows that the bundle
    answers."""
    sentences = [f"Judged on the rows of {place}."] if name else []
    shared = get_part(report, "shared_rows")
    if counts := [f"{whole(of.get(place))} in {n}" for n, of in shared.items()]:
        sentences.append(f"Rows that the model was also fitted to: {', '.join(counts)}.")
    again = get_part(get_part(report, "judged"), "answers")
    if again.get("rows") and not name:
        rows = whole(again["rows"])
        sentences.append(f"The packaged bundle answers {rows} of these rows with the same bits.")
    elif again and not name:
        sentences.append(f"The packaged bundle was not compared row by row: {again.get('why')}.")
    return sentences


def _cosines(section: Document) -> tuple[ReportTable, ...]:
    cosine, write = get_part(section, "cosine"), level("cosine")
    shown = [k for k in ("mean", "p01", "min") if k in cosine]
    body = tuple((line(k), *figures(write(cosine.get(k)))) for k in shown)
    title = "Cosine to float"
    return (ReportTable(title, (title, ""), body, (1,), fold=title),) if body else ()


def _cells(report: Document) -> list[tuple[str, Document]]:
    cells = get_parts(get_part(report, "speed"), "cells")
    lengths = [f"{format_length(c)} tokens" if format_length(c) else "" for c in cells]
    return [(f"batch {plain(c.get('batch'))}{n}", c) for c, n in zip(cells, lengths, strict=True)]


def latency(report: Document, recipe: Any) -> tuple[Card, ...]:
    """Return the report's cards on latency distributions, one per timed batch size and sequence
    length; a single card where nothing was timed."""
    cells = _cells(report)
    if cells and generation.is_generation(report):
        return generation.latency(report, recipe)
    if not cells:
        return (build_unmeasured_card("Latency", "Latency", report, "speed"),)
    target = str(report.get("target", ""))
    return tuple(_latency(where, cell, target, recipe) for where, cell in cells)


def _latency(where: str, cell: Document, target: str, recipe: Any) -> Card:
    first, title = baseline(cell, target), f"Latency, {where}"
    systems = {
        system(n, recipe): (plots.style(n, first), get_part(s, "end_to_end"))
        for n, s in get_part(cell, "systems").items()
    }
    hint = f"Every dot is one of {whole(cell.get('runs'))} interleaved runs; the thick mark "
    hint += "is the median, the whisker ends at p99."
    percentiles = ("p50", "p90", "p95", "p99")
    body = tuple(
        (line(name), *figures(*(ms(e.get(p)) for p in percentiles)))
        for name, (_, e) in systems.items()
    )
    lost = [n for n, (_, e) in systems.items() if (finite(e.get("p50")) or 0) <= 0]
    torch = SYSTEMS[TORCH]
    if first != TORCH and torch in systems:  # too slow for the scale of the others
        hint += f" {torch} is in the table."
    drawn = {n: e for n, e in systems.items() if first == TORCH or n != torch}
    table = ReportTable(
        title, ("", *percentiles), body, (1, 2, 3, 4), stacked=True, fold=AS_A_TABLE
    )
    return Card(
        title,
        hint,
        plots.latency(drawn, title),
        paragraphs=not_drawn(lost),
        tables=(table,),
    )


def stages(report: Document, recipe: Any) -> tuple[Card, ...]:
    """Return one card of the report on the time per stage for each cell; () for generation, which
    has one stage."""
    cells = [] if generation.is_generation(report) else _cells(report)
    return tuple(_stages(where, cell, report, recipe) for where, cell in cells)


def _stages(where: str, cell: Document, report: Document, recipe: Any) -> Card:
    title = f"Time per stage, {where}"
    timings = {
        system(n, recipe): {
            k: v.get("p50") if isinstance(v, dict) else v for k, v in get_part(s, "stages").items()
        }
        for n, s in get_part(cell, "systems").items()
    }
    names = tuple(dict.fromkeys(k for s in timings.values() for k in s))
    if not names:
        return build_unmeasured_card(title, "Stages", report, "stages")
    drawn = {n: {k: finite(v) or 0.0 for k, v in s.items()} for n, s in timings.items()}
    lost = [f"{n} {k}" for n, s in timings.items() for k in names if finite(s.get(k)) is None]
    label = f"Stages, {where}"
    table = ReportTable(
        label,
        ("", *names),
        tuple((line(n), *figures(*(ms(s.get(k)) for k in names))) for n, s in timings.items()),
        tuple(range(1, len(names) + 1)),
        stacked=len(names) <= 6,
        fold=AS_A_TABLE,
    )
    return Card(
        title,
        "Median milliseconds of each stage.",
        plots.stages(drawn, label),
        names,
        not_drawn(lost),
        tables=(table,),
    )


def gates(report: Document) -> Card:
    """Return the report's card of gates: verdict, measured value, limit and message."""
    body = []
    for g in sort_gates(report):
        name = line(Span(str(g.get("name")), "code"), *small(str(g.get("message", ""))))
        counted = g.get("measured") is None and g.get("limit") is None  # the message says it all
        measured = "–" if counted else plain(g.get("measured"))
        limit = "–" if g.get("limit") is None else plain(g.get("limit"))
        value = line(figure(measured), *small(interval(g.get("interval"), plain)))
        body.append((name, line(badge(g.get("verdict"))), value, line(figure(limit))))
    title = "Gates"
    if not body:
        return build_unmeasured_card(title, title, report, "gates")
    hint = "Requirements of the recipe, failures first. Measured is what the sentence below a "
    hint += "gate's name states, with its interval, all of which must keep Limit for a pass."
    heads = ("Gate", "", "Measured", "Limit")
    return Card(title, hint, tables=(ReportTable(title, heads, tuple(body), (2, 3), stacked=True),))


def modules(report: Document) -> Card:
    """Return the report's card of the quantization error at each module's output, in model order;
    of its weight, where compression read no inputs."""
    entries = get_parts(report, "modules")
    title = "Error per layer"
    if not entries:
        return build_unmeasured_card(title, "Modules", report, "modules")
    names = [str(m.get("module")) for m in entries]
    measured = any(m.get("output_error") is not None for m in entries)
    drawn = "output_error" if measured else "weight_error"
    errors = [finite(m.get(drawn)) for m in entries]
    known = [(n, e) for n, e in zip(names, errors, strict=True) if e is not None]
    lost = [n for n, m in zip(names, entries, strict=True) if is_broken(m.get(drawn))]
    floats = sum(1 for m in entries if m.get(drawn) is None)
    of = "output" if measured else "weight"
    hint = f"Relative error of each module's {of}, in model order; the worst {WORST} in red."
    if floats:
        hint += f" {floats} without a figure are in the table."
    heads = ("Module", "Output error", "Weight error", "Saturation")
    table = ReportTable(
        title,
        heads,
        tuple(_module(m) for m in entries),
        (1, 2, 3),
        stacked=True,
        fold=f"All {len(entries)} modules",
        about="On calibration inputs. Output error: relative L2 of the module's output. Weight "
        "error: relative Frobenius norm of its weight. Saturation: share of inputs clipped to the "
        "range. None of them has a limit.",
    )
    chart = plots.columns(known, title, WORST)
    return Card(title, hint, chart, paragraphs=not_drawn(lost), tables=(table,))


def _module(module: Document) -> tuple[Line, ...]:
    notes = [module.get("scheme"), _range(module.get("range")), module.get("note")]
    name = Span(str(module.get("module")), "code")
    keys = ("output_error", "weight_error", "saturation")
    return (
        line(name, *small(*(str(n) for n in notes if n))),
        *figures(*(error(module.get(k)) for k in keys)),
    )


def _range(limits: Any) -> str:
    if isinstance(limits, list | tuple) and len(limits) == 2:
        return f"range {plain(limits[0])} to {plain(limits[1])}"
    if isinstance(limits, dict):
        return "range " + ", ".join(f"{k} {plain(v)}" for k, v in limits.items())
    return str(limits or "")


def fallbacks(report: Document) -> Card:
    """Return the report's card of fallbacks: modules that ran in more bits than the recipe asks
    for."""
    title, notes = "Fallbacks and notes", report.get("fallbacks")
    if notes is None:
        return build_unmeasured_card(title, "Fallbacks", report, "fallbacks")
    if not notes:
        return Card(title, paragraphs=(Paragraph(line("None: everything ran as requested.")),))
    listed = notes if isinstance(notes, list) else [notes]
    return Card(title, notes=tuple(Paragraph(_fallback(f)) for f in listed))


def _fallback(note: Any) -> Line:
    """Format for the report a fallback to more bits, given as {"module", "what", "why"} or as a
    sentence."""
    if not isinstance(note, dict) or "module" not in note:
        return line(format_value(note))
    rest = {k: v for k, v in note.items() if k not in ("module", "what", "why")}
    text = f" ({note.get('what')}): {note.get('why')}" + (f"; {format_value(rest)}" if rest else "")
    return line(Span(str(note["module"]), "code"), text)


def format_value(value: Any) -> str:
    """Format any JSON value on one line of the report."""
    if isinstance(value, dict):
        return "; ".join(f"{k}: {format_value(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(format_value(v) for v in value)
    return plain(value) if isinstance(value, float) else str(value)
