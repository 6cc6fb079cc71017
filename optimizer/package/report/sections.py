"""The parts of report.html that belong to one target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from optimizer.package.report import generation, plots
from optimizer.package.report.comparison import (
    Cell,
    Document,
    baseline,
    gates_in_order,
    part,
    parts,
    quantized,
    system,
    why_missing,
)
from optimizer.package.report.figures import (
    NOT_A_NUMBER,
    NOT_MEASURED,
    broken,
    change,
    error,
    finite,
    interval,
    level,
    ms,
    nats,
    plain,
    whole,
)
from optimizer.package.report.markup import Child, Html, details, join, table, tag
from optimizer.package.report.rows import rows

WORST = 3  # modules marked in the per-layer chart


def flagged(text: str) -> Html:
    """A figure; what is missing or no number stands out."""
    if text in (NOT_A_NUMBER, "infinite"):
        return tag("strong", text, cls="bad")
    return tag("span", text, cls="missing") if text == NOT_MEASURED else join([text])


def badge(verdict: Any) -> Html:
    word = str(verdict)
    known = word if word in ("pass", "fail", "inconclusive") else None
    return tag("span", word.upper(), cls=f"badge {known}" if known else "badge")


def missing(what: str, report: Document, section: str) -> Html:
    return tag(
        "p", tag("strong", f"{what} not measured: "), why_missing(report, section), cls="missing"
    )


def card(title: str, hint: str, *children: Child) -> Html:
    return tag(
        "section",
        tag("h3", title),
        tag("p", hint, cls="hint") if hint else None,
        *children,
        cls="card",
    )


def comparison(report: Document, recipe: Any) -> Html:
    """The table float against quantized."""
    name = quantized(recipe)

    def shown(cell: Cell) -> Html:
        return join([flagged(cell.text), tag("small", cell.note) if cell.note else None])

    body = [
        [r.name, join([flagged(r.before.text), ": ", r.before.note])]
        if r.unmeasured
        else [r.name, shown(r.before), shown(r.after), shown(r.change)]
        for r in rows(report)
    ]
    examples = part(report, "quality").get("examples")
    level_of = finite(part(report, "quality").get("confidence"))
    hint = "Times are end to end: text in, answer out."
    kind = "examples that both models answered"
    if generation.generates(report):
        hint, kind = "Speed by batch × tokens of prompt.", "windows of held-out text"
    if examples is not None:
        hint += f" Quality on {whole(examples)} {kind}"
        hint += f", intervals at {100 * level_of:.4g} % confidence." if level_of else "."
    heads = ["", "Float", name[0].upper() + name[1:], "Change"]
    return card(
        f"Float against {name}",
        hint,
        table(heads, body, label=f"Float against {name}", numbers=(1, 2, 3), stacked=True),
    )


def quality(report: Document, recipe: Any, name: str = "") -> Html:
    """The accuracy difference and its interval against the margin. name: of a further set."""
    section = part(report, "quality")
    title = f"Is {quantized(recipe)} as good as float" + (f" on {name}?" if name else "?")
    if not section.get("metric"):
        return card(title, "", missing("Quality", report, "quality"))
    metric = str(section["metric"])
    what, moved, write = metric, part(section, "difference"), change(metric)
    if generation.generates(report):
        what, write = "the log-likelihood of held-out text", nats
    value, margin = finite(moved.get("value")), finite(section.get("margin"))
    bounds = moved.get("interval")
    ends = [finite(b) for b in bounds] if isinstance(bounds, list | tuple) else []
    hint = f"Change of {what}. The gate passes when the whole interval lies right of the red line."
    if section.get("report_only"):
        hint = f"Change of {what}, reported only: no gate follows from it."
    picture: Child
    if value is None or margin is None or len(ends) != 2 or None in ends:
        picture = tag(
            "p",
            "No picture: ",
            flagged(write(moved.get("value"))),
            ", interval ",
            flagged(interval(bounds, write) or NOT_MEASURED),
            ", margin ",
            flagged(write(section.get("margin"))),
            cls="missing",
        )
    else:
        low, high = (e for e in ends if e is not None)
        picture = plots.difference(value, (low, high), margin, write, f"Change of {what}")
    needed = section.get("needed")
    more = tag("p", f"{whole(needed)} examples would decide it.") if needed is not None else None
    note = tag("p", str(section["note"]), cls="hint") if section.get("note") else None
    cosine, write = part(section, "cosine"), level("cosine")
    facts = [[k, flagged(write(cosine.get(k)))] for k in ("mean", "p01", "min") if k in cosine]
    facts_table = table(["Cosine to float", ""], facts, label="Cosine to float", numbers=(1,))
    cosines = details("Cosine to float", facts_table) if facts else None
    return card(title, hint, picture, more, note, cosines, generation.agreement(section))


def _cells(report: Document) -> list[tuple[str, Document]]:
    return [
        (f"batch {plain(c.get('batch'))} × {plain(c.get('sequence'))} tokens", c)
        for c in parts(part(report, "speed"), "cells")
    ]


def _class(name: str, first: str | None) -> str:
    return "candidate" if name == "candidate" else "baseline" if name == first else "other"


def latency(report: Document, recipe: Any) -> list[Html]:
    """A card of latency distributions per batch x sequence cell."""
    cells = _cells(report)
    if cells and generation.generates(report):
        return generation.latency(report, recipe)
    if not cells:
        return [card("Latency", "", missing("Latency", report, "speed"))]
    cards = []
    for where, cell in cells:
        first = baseline(cell, str(report.get("target", "")))
        systems = {
            system(n, recipe): (_class(n, first), part(s, "end_to_end"))
            for n, s in part(cell, "systems").items()
        }
        hint = f"Every dot is one of {whole(cell.get('runs'))} interleaved runs; the thick mark "
        hint += "is the median, the whisker ends at p99."
        body = [
            [name, *(flagged(ms(e.get(p))) for p in ("p50", "p90", "p95", "p99"))]
            for name, (_, e) in systems.items()
        ]
        broken_ones = [n for n, (_, e) in systems.items() if (finite(e.get("p50")) or 0) <= 0]
        cards.append(
            card(
                f"Latency, {where}",
                hint,
                plots.latency(systems, f"Latency, {where}"),
                not_drawn(broken_ones),
                details(
                    "As a table",
                    table(
                        ["", "p50", "p90", "p95", "p99"],
                        body,
                        label=f"Latency, {where}",
                        numbers=(1, 2, 3, 4),
                        stacked=True,
                    ),
                ),
            )
        )
    return cards


def not_drawn(names: Iterable[str]) -> Html | None:
    listed = ", ".join(names)
    return tag("p", f"Not drawn, no usable figure: {listed}.", cls="bad") if listed else None


def stages(report: Document, recipe: Any) -> list[Html]:
    """A card of the time per stage for each cell; generating has one stage, told by `latency`."""
    cards = []
    for where, cell in [] if generation.generates(report) else _cells(report):
        timings = {
            system(n, recipe): {
                k: v.get("p50") if isinstance(v, dict) else v for k, v in part(s, "stages").items()
            }
            for n, s in part(cell, "systems").items()
        }
        names = list(dict.fromkeys(k for s in timings.values() for k in s))
        if not names:
            why = why_missing(report, "stages")
            cards.append(
                card(
                    f"Where the time goes, {where}",
                    "",
                    tag("p", tag("strong", "Stages not measured: "), why, cls="missing"),
                )
            )
            continue
        drawn = {n: {k: finite(v) or 0.0 for k, v in s.items()} for n, s in timings.items()}
        unknown = [
            f"{n} {k}" for n, s in timings.items() for k in names if finite(s.get(k)) is None
        ]
        body = [[n, *(flagged(ms(s.get(k))) for k in names)] for n, s in timings.items()]
        cards.append(
            card(
                f"Where the time goes, {where}",
                "Median milliseconds of each stage.",
                plots.stages(drawn, f"Stages, {where}"),
                _legend(names),
                not_drawn(unknown),
                details(
                    "As a table",
                    table(
                        ["", *names],
                        body,
                        label=f"Stages, {where}",
                        numbers=range(1, len(names) + 1),
                        stacked=len(names) <= 6,
                    ),
                ),
            )
        )
    return cards


def _legend(names: list[str]) -> Html:
    def key(i: int) -> Html:
        square = tag("rect", width=11, height=11, rx=2, cls=f"stage{min(i, 4)}")
        return tag("svg", square, width=11, height=11, aria_hidden="true")

    return tag("ul", *(tag("li", key(i), n) for i, n in enumerate(names)), cls="legend")


def gates(report: Document) -> Html:
    """Every gate: verdict, what was measured, the limit, and the message."""
    body = []
    for g in gates_in_order(report):
        name = join([tag("code", str(g.get("name"))), tag("small", str(g.get("message", "")))])
        bounds = interval(g.get("interval"), plain)
        counted = g.get("measured") is None and g.get("limit") is None  # the message says it all
        figure = join(["–"]) if counted else flagged(plain(g.get("measured")))
        value = join([figure, tag("small", bounds) if bounds else None])
        limit = "–" if g.get("limit") is None else flagged(plain(g.get("limit")))
        body.append([name, badge(g.get("verdict")), value, limit])
    if not body:
        return card("Gates", "", missing("Gates", report, "gates"))
    return card(
        "Gates",
        "What was promised before anything was measured, failures first.",
        table(["Gate", "", "Measured", "Limit"], body, label="Gates", numbers=(2, 3), stacked=True),
    )


def modules(report: Document) -> Html:
    """The error quantization makes at each module's output, in model order."""
    entries = parts(report, "modules")
    title = "Error per layer"
    if not entries:
        return card(title, "", missing("Modules", report, "modules"))
    names = [str(m.get("module")) for m in entries]
    errors = [finite(m.get("output_error")) for m in entries]
    known = [(n, e) for n, e in zip(names, errors, strict=True) if e is not None]
    lost = [n for n, m in zip(names, entries, strict=True) if broken(m.get("output_error"))]
    floats = sum(1 for m in entries if m.get("output_error") is None)
    hint = f"Relative error of each module's output, in model order; the worst {WORST} in red."
    if floats:
        hint += f" {floats} without a figure are in the table."
    keys = ("output_error", "weight_error", "saturation")
    body = []
    for name, m in zip(names, entries, strict=True):
        notes = [m.get("scheme"), _range(m.get("range")), m.get("note")]
        about = join([tag("code", name), *(tag("small", str(n)) for n in notes if n)])
        body.append([about, *(flagged(error(m.get(k))) for k in keys)])
    heads = ["Module", "Output error", "Weight error", "Saturation"]
    return card(
        title,
        hint,
        plots.columns(known, title, WORST),
        not_drawn(lost),
        details(
            f"All {len(entries)} modules",
            table(heads, body, label=title, numbers=(1, 2, 3), stacked=True),
        ),
    )


def _range(limits: Any) -> str:
    if isinstance(limits, list | tuple) and len(limits) == 2:
        return f"range {plain(limits[0])} to {plain(limits[1])}"
    if isinstance(limits, dict):
        return "range " + ", ".join(f"{k} {plain(v)}" for k, v in limits.items())
    return str(limits or "")


def fallbacks(report: Document) -> Html:
    """Whatever ran otherwise than asked; says so when nothing did."""
    notes = report.get("fallbacks")
    if notes is None:
        return card("Fallbacks and notes", "", missing("Fallbacks", report, "fallbacks"))
    if not notes:
        return card("Fallbacks and notes", "", tag("p", "None: everything ran as asked."))
    listed = notes if isinstance(notes, list) else [notes]
    return card(
        "Fallbacks and notes",
        "",
        tag("ul", *(tag("li", _fallback(f)) for f in listed), cls="notes"),
    )


def _fallback(note: Any) -> Html:
    """A module that ran otherwise than asked, as {"module", "what", "why"} or as a sentence."""
    if not isinstance(note, dict) or "module" not in note:
        return join([as_line(note)])
    rest = {k: v for k, v in note.items() if k not in ("module", "what", "why")}
    text = f" ({note.get('what')}): {note.get('why')}" + (f"; {as_line(rest)}" if rest else "")
    return join([tag("code", str(note["module"])), text])


def as_line(value: Any) -> str:
    """Anything JSON holds, on one line, for a place that expects a sentence."""
    if isinstance(value, dict):
        return "; ".join(f"{k}: {as_line(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(as_line(v) for v in value)
    return plain(value) if isinstance(value, float) else str(value)
