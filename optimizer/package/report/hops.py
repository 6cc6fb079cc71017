"""The ledger's part of report.html: every hop of the numbers against its tolerance."""

from __future__ import annotations

from typing import Any

from optimizer.package.report import plots
from optimizer.package.report.comparison import Document, part, parts
from optimizer.package.report.figures import finite, plain
from optimizer.package.report.markup import Child, Html, details, join, table, tag
from optimizer.package.report.sections import as_line, card, flagged, missing, not_drawn


def ledger(report: Document) -> Html:
    """Every hop from the checkpoint to the harness; what failed, and what was not run here."""
    hops = parts(report, "ledger")
    title = "Ledger: where the numbers could have gone wrong"
    if not hops:
        return card(title, "", missing("Ledger", report, "ledger"))
    ran = [h for h in hops if not _not_run(h)]
    listed = [
        tag("li", tag("strong", str(h.get("hop"))), ": ", as_line(problem))
        for h in hops
        for problem in h.get("problems") or []
    ]
    listed += [
        tag("li", tag("strong", f"{h.get('hop')} not run here: "), str(h.get("why")), cls="missing")
        for h in hops
        if _not_run(h)
    ]
    lost = [str(h.get("hop")) for h in ran if finite(_distance(h)) is None]
    heads = ["Hop", "Distance", "Tolerance", "Largest", "Cosine"]
    body = [_row(h) for h in hops]
    return card(
        title,
        "The same inputs after every step: relative L2 of the example nearest to its limit, "
        "from what each is compared with, on a logarithmic scale. The red line is the tolerance "
        "declared beforehand.",
        plots.log_bars([_bar(h) for h in ran], "Ledger"),
        not_drawn(lost),
        tag("ul", *listed, cls="notes") if listed else None,
        details(
            "As a table, with reasons",
            table(heads, body, label="Ledger", numbers=(1, 2, 3, 4), stacked=True),
        ),
    )


def _not_run(hop: Document) -> bool:
    return hop.get("ok") is None and not part(hop, "measured")


def _distance(hop: Document) -> Any:
    """What the tolerance is held against. A failed hop without a number was not finite."""
    measured = part(hop, "measured")
    worst = measured.get("worst_example", measured.get("relative_l2"))
    return float("nan") if worst is None and hop.get("ok") is False else worst


def _bar(hop: Document) -> plots.Bar:
    value, limit, ok = _distance(hop), hop.get("tolerance"), hop.get("ok") is True
    text = f"{plain(value)} {'≤' if ok else 'against'} {plain(limit)}"
    return plots.Bar(str(hop.get("hop")), finite(value), finite(limit), ok, text)


def _row(hop: Document) -> list[Child]:
    unrun, why = _not_run(hop), hop.get("why")
    about = join(
        [
            str(hop.get("hop")),
            tag("strong", " out of tolerance", cls="bad") if hop.get("ok") is False else None,
            tag("small", f"from {hop.get('from')}"),
            tag("small", str(why)) if why and not unrun else None,
        ]
    )
    if unrun:
        return [about, tag("span", f"not run here: {why}", cls="missing")]
    measured = part(hop, "measured")
    numbers = (
        _distance(hop),
        hop.get("tolerance"),
        measured.get("max_abs"),
        measured.get("cosine"),
    )
    return [about, *(flagged(plain(v)) for v in numbers)]
