"""Card and rows on the speed of smaller models, for goal.latency_gain."""

from __future__ import annotations

from typing import Any

from optimizer.package.report.comparison import (
    Document,
    TableEntry,
    TableRow,
    divide,
    get_part,
    get_parts,
)
from optimizer.package.report.figures import NOT_MEASURED, finite, interval, ms, plain, times, whole
from optimizer.package.report.view import Card, Line, ReportTable, figures, line

SIZES = {"blocks": "Blocks", "ffn": "Neurons", "heads": "Key/value heads"}


def gain_rows(report: Document) -> list[TableRow]:
    """Return the report's row on the speedup over the unreduced model; [] if it was not timed."""
    gain = get_part(get_part(report, "speed"), "gain")
    if not gain:
        return []
    p50 = get_part(gain, "p50")
    reached = divide(1.0, gain.get("ratio"))
    note = f"{_bounds(gain) or NOT_MEASURED}; goal {plain(gain.get('goal'))}"
    length = plain(gain.get("sequence", gain.get("prompt")))
    return [
        TableRow(
            f"Gain, batch {plain(gain.get('batch'))} × {length}",
            TableEntry(ms(p50.get("unreduced")), f"whole, {_precision(gain)}"),
            TableEntry(ms(p50.get("candidate"))),
            TableEntry(f"{times(reached)} as fast", note),
        )
    ]


def _precision(measured: Document) -> str:
    """Return for the report the precision in which the unreduced model was timed, "float" or
    "quantized"."""
    return "float" if measured.get("over") == "float" else "quantized"


def _bounds(measured: Document) -> str:
    """Format for the report the interval of the speedup, 1 / ratio; "" without an interval."""
    ends = measured.get("interval")
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return ""
    return interval([divide(1.0, end) for end in reversed(ends)], times, unit=False)


def sizes(report: Document) -> tuple[Card, ...]:
    """Return the report's card with the timed sizes among which reduce chose; () without
    timings."""
    table = get_part(report, "latencies")
    if not table:
        return ()
    kinds = [kind for kind in SIZES if get_part(table, "unreduced").get(kind)]
    reduced = get_part(report, "reduced")
    kept = {kind: pair[1] for kind, pair in get_part(reduced, "sizes").items() if kind in SIZES}
    tried = get_parts(table, "confirmed")
    own = get_part(table, "whole")
    entries = [*([own] if own else []), *get_parts(table, "entries")]
    body = [_row(entry, kinds, ("", "")) for entry in entries]
    for known in tried:
        what = "kept" if get_part(known, "sizes") == kept else "tried"
        body.append(_row(known, kinds, (_distance(reduced, get_part(known, "sizes")), what)))
    heads = (*(SIZES[kind] for kind in kinds), "Times as fast", "Interval", "Predicted")
    heads = (*heads, "From the reference", "")
    cell = get_part(table, "cell")
    length = plain(cell.get("sequence", cell.get("prompt")))
    hint = (
        f"Models of these sizes compared with the unreduced one, {_precision(table)}, at batch "
        f"{plain(cell.get('batch'))} × {length}, before weights were chosen; "
        f"goal: {plain(table.get('goal'))}."
    )
    if get_parts(reduced, "compared"):
        hint += (
            " Of those that reach it, the one with outputs nearest to the reference before "
            "training was kept."
        )
    title = "Speed of smaller models"
    numbers = tuple(range(len(kinds) + 4))
    return (Card(title, hint, tables=(ReportTable(title, heads, tuple(body), numbers),)),)


def _distance(reduced: Document, sizes: Document) -> str:
    """Format for the report the distance of a reduced model from the reference; "" if it was not
    compared."""
    known = [c for c in get_parts(reduced, "compared") if get_part(c, "sizes") == sizes]
    return next((plain(finite(c.get("distance"))) for c in known), "")


def _row(entry: Document, kinds: list[str], words: tuple[str, str]) -> tuple[Line, ...]:
    """Return the row of one timed size in the report. words: distance from the reference, and
    "kept" or "tried"."""
    own: Any = get_part(entry, "sizes")
    predicted = finite(entry.get("predicted"))
    return (
        *(line(whole(own.get(kind))) for kind in kinds),
        *figures(times(divide(1.0, entry.get("ratio")))),
        line(_bounds(entry)),
        line(times(1 / predicted) if predicted else ""),
        *map(line, words),
    )
