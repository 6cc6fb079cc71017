"""Card of the ledger: every hop against its tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optimizer.package.report import plots
from optimizer.package.report.cards.sections import AS_A_TABLE, as_line, unmeasured
from optimizer.package.report.comparison import Document, part, parts
from optimizer.package.report.figures import finite, plain
from optimizer.package.report.view import (
    Card,
    Line,
    Paragraph,
    Span,
    Table,
    figures,
    line,
    not_drawn,
    small,
)
from optimizer.validate.ledger.entry import statistic


def ledger(report: Document) -> Card:
    """Return the card: every hop from the checkpoint to the harness, failures, skipped hops."""
    hops = parts(report, "ledger")
    title = "Ledger: where the numbers could have gone wrong"
    if not hops:
        return unmeasured(title, "Ledger", report, "ledger")
    ran = [h for h in hops if not _not_run(h)]
    lost = [str(h.get("hop")) for h in ran if finite(_distance(h)) is None]
    heads = ("Hop", "Distance", "Tolerance", "Largest", "Cosine")
    table = Table(
        "Ledger",
        heads,
        tuple(_row(h) for h in hops),
        (1, 2, 3, 4),
        stacked=True,
        fold=f"{AS_A_TABLE}, with reasons",
    )
    return Card(
        title,
        "The same inputs after every step: relative L2 distance from the step it is compared "
        "with, of the example nearest to its limit, on a logarithmic scale. The red line is the "
        "limit, derived or measured in this run.",
        plots.log_bars([_bar(h) for h in ran], "Ledger"),
        paragraphs=not_drawn(lost),
        notes=tuple(_notes(hops)),
        tables=(table,),
    )


def _notes(hops: list[Document]) -> Iterator[Paragraph]:
    """Yield paragraphs on failed hops, then on hops not run."""
    for hop in hops:
        for problem in hop.get("problems") or []:
            yield Paragraph(line(Span(str(hop.get("hop")), "strong"), ": ", as_line(problem)))
    for hop in filter(_not_run, hops):
        name = Span(f"{hop.get('hop')} not run here: ", "strong")
        yield Paragraph(line(name, str(hop.get("why"))), "missing")


def _not_run(hop: Document) -> bool:
    return hop.get("ok") is None and not part(hop, "measured")


def _distance(hop: Document) -> Any:
    """Return the distance compared with the tolerance; NaN for a failed hop without a number."""
    measured = part(hop, "measured")
    reached = measured.get(statistic(str(hop.get("hop"))), measured.get("relative_l2"))
    return float("nan") if reached is None and hop.get("ok") is False else reached


def _bar(hop: Document) -> plots.Bar:
    value, limit, ok = _distance(hop), hop.get("tolerance"), hop.get("ok") is True
    text = f"{plain(value)} {'≤' if ok else 'against'} {plain(limit)}"
    return plots.Bar(str(hop.get("hop")), finite(value), finite(limit), ok, text)


def _row(hop: Document) -> tuple[Line, ...]:
    unrun, why = _not_run(hop), hop.get("why")
    about = [Span(str(hop.get("hop")))]
    if hop.get("ok") is False:
        about.append(Span(" out of tolerance", "bad"))
    about += small(f"from {hop.get('from')}", str(why) if why and not unrun else "")
    if unrun:
        return line(*about), line(Span(f"not run here: {why}", "missing"))
    measured = part(hop, "measured")
    numbers = (
        _distance(hop),
        hop.get("tolerance"),
        measured.get("max_abs"),
        measured.get("cosine"),
    )
    return line(*about), *figures(*(plain(v) for v in numbers))
