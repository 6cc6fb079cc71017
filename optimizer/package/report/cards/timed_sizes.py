"""How fast models of other sizes were, where a latency gain decided what was left out."""

from __future__ import annotations

from typing import Any

from optimizer.package.report.comparison import Cell, Document, Row, part, parts, ratio_of
from optimizer.package.report.figures import NOT_MEASURED, finite, interval, ms, plain, times, whole
from optimizer.package.report.view import Card, Line, Table, figures, line

SIZES = {"blocks": "Blocks", "ffn": "Neurons", "heads": "Key/value heads"}


def gain_rows(report: Document) -> list[Row]:
    """What the target runs beside the same of the whole model."""
    gain = part(part(report, "speed"), "gain")
    if not gain:
        return []
    p50 = part(gain, "p50")
    reached = ratio_of(1.0, gain.get("ratio"))
    note = f"{_bounds(gain) or NOT_MEASURED}; goal {plain(gain.get('goal'))}"
    length = plain(gain.get("sequence", gain.get("prompt")))
    return [
        Row(
            f"Gain, batch {plain(gain.get('batch'))} × {length}",
            Cell(ms(p50.get("unreduced")), f"whole, {_form(gain)}"),
            Cell(ms(p50.get("candidate"))),
            Cell(f"{times(reached)} as fast", note),
        )
    ]


def _form(measured: Document) -> str:
    """Of the whole model."""
    return "float" if measured.get("over") == "float" else "same form"


def _bounds(measured: Document) -> str:
    """The interval of how many times as fast."""
    ends = measured.get("interval")
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return ""
    return interval([ratio_of(1.0, end) for end in reversed(ends)], times, unit=False)


def sizes(report: Document) -> tuple[Card, ...]:
    """The table that the smaller sizes follow from; no card without one."""
    table = part(report, "latencies")
    if not table:
        return ()
    kinds = [kind for kind in SIZES if part(table, "unreduced").get(kind)]
    reduced = part(report, "reduced")
    kept = {kind: pair[1] for kind, pair in part(reduced, "sizes").items() if kind in SIZES}
    tried = parts(table, "confirmed")
    own = part(table, "whole")
    entries = [*([own] if own else []), *parts(table, "entries")]
    body = [_row(entry, kinds, ("", "")) for entry in entries]
    for known in tried:
        what = "kept" if part(known, "sizes") == kept else "tried"
        body.append(_row(known, kinds, (_distance(reduced, part(known, "sizes")), what)))
    heads = (*(SIZES[kind] for kind in kinds), "Times as fast", "Interval", "Predicted")
    heads = (*heads, "From the reference", "")
    cell = part(table, "cell")
    length = plain(cell.get("sequence", cell.get("prompt")))
    hint = (
        f"Models of these sizes beside the whole one, {_form(table)}, at batch "
        f"{plain(cell.get('batch'))} × {length}, before anything was chosen; "
        f"{plain(table.get('goal'))} is the goal."
    )
    if parts(reduced, "compared"):
        hint += (
            " Of those that reach it the nearest to the reference was kept, by its answers "
            "before it learned anything."
        )
    title = "How fast smaller models are"
    numbers = tuple(range(len(kinds) + 4))
    return (Card(title, hint, tables=(Table(title, heads, tuple(body), numbers),)),)


def _distance(reduced: Document, sizes: Document) -> str:
    """Of what was compared with the reference."""
    known = [c for c in parts(reduced, "compared") if part(c, "sizes") == sizes]
    return next((plain(finite(c.get("distance"))) for c in known), "")


def _row(entry: Document, kinds: list[str], words: tuple[str, str]) -> tuple[Line, ...]:
    """words: its distance, and what became of it."""
    own: Any = part(entry, "sizes")
    predicted = finite(entry.get("predicted"))
    return (
        *(line(whole(own.get(kind))) for kind in kinds),
        *figures(times(ratio_of(1.0, entry.get("ratio")))),
        line(_bounds(entry)),
        line(times(1 / predicted) if predicted else ""),
        *map(line, words),
    )
