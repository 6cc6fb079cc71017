"""Card of the ledger: every hop against its limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optimizer.package.report import plots
from optimizer.package.report.cards.sections import AS_A_TABLE, build_unmeasured_card, format_value
from optimizer.package.report.comparison import Document, get_part, get_parts
from optimizer.package.report.figures import finite, plain
from optimizer.package.report.view import (
    Card,
    Line,
    Paragraph,
    ReportTable,
    Span,
    figures,
    line,
    not_drawn,
    small,
)
from optimizer.validate.ledger.breach import write_breach
from optimizer.validate.ledger.distance import WHOLE
from optimizer.validate.ledger.entry import WORST, describe_examples, name_statistic

ABOUT = (
    "Distance, held against Limit, decides. It is |found − expected| / |expected| (L2) of the "
    "examples under Judged over: of the worst one, or of all together where the limit is a budget. "
    "Largest difference (of one number, in the output's own unit) and Lowest cosine (of one "
    "example) have no limit, so a hop may pass with a difference above the number under Limit. "
    "Where correct runs of the model lie as far apart as its answers are long, their limit accepts "
    "an answer of zeros, and nothing limits the answers from end to end. "
    "Where a limit is from stands below the hop's name: all follow from the run, but "
    "validate.quantization_budget, which the recipe chooses."
)


def ledger(report: Document) -> Card:
    """Return the report's card on the ledger: every hop from the checkpoint to the harness,
    failures, skipped hops."""
    hops = get_parts(report, "ledger")
    title = "Ledger: where the numbers could have gone wrong"
    if not hops:
        return build_unmeasured_card(title, "Ledger", report, "ledger")
    ran = [h for h in hops if not _not_run(h)]
    lost = [str(h.get("hop")) for h in ran if finite(_distance(h)) is None]
    heads = ("Hop", "Distance", "Limit", "Judged over", "Largest difference", "Lowest cosine")
    table = ReportTable(
        "Ledger",
        heads,
        tuple(_row(h) for h in hops),
        (1, 2, 4, 5),
        stacked=True,
        fold=f"{AS_A_TABLE}, with reasons",
        about=ABOUT,
    )
    return Card(
        title,
        "The same inputs after every step: relative L2 distance of the worst example (compress: of "
        "all together) from the step it is compared with, on a logarithmic scale. The red line is "
        "the limit: it follows from this run, but that of compress, which the recipe chooses.",
        plots.log_bars([_bar(h) for h in ran], "Ledger"),
        paragraphs=not_drawn(lost),
        notes=tuple(_notes(hops)),
        tables=(table,),
    )


def _notes(hops: list[Document]) -> Iterator[Paragraph]:
    """Write the paragraphs of the report's ledger card: on failed hops, then on hops not run."""
    for hop in hops:
        for problem in hop.get("problems") or []:
            yield Paragraph(line(Span(str(hop.get("hop")), "strong"), ": ", format_value(problem)))
    for hop in filter(_not_run, hops):
        name = Span(f"{hop.get('hop')} not run here: ", "strong")
        yield Paragraph(line(name, str(hop.get("why"))), "missing")


def _not_run(hop: Document) -> bool:
    return hop.get("ok") is None and not get_part(hop, "measured")


def _distance(hop: Document) -> Any:
    """Return a hop's distance that the report compares with its limit; NaN for a failed hop without
    a number."""
    measured = get_part(hop, "measured")
    reached = measured.get(name_statistic(str(hop.get("hop"))), measured.get("relative_l2"))
    return float("nan") if reached is None and hop.get("ok") is False else reached


def _bar(hop: Document) -> plots.Bar:
    value, limit, ok = _distance(hop), hop.get("tolerance"), hop.get("ok") is True
    measured, allowed = _texts(hop)
    sign = "≤" if ok and allowed[:1].isdigit() else "against"
    text = f"{measured} {sign} {allowed}" if allowed else measured
    return plots.Bar(str(hop.get("hop")), finite(value), finite(limit), ok, text)


def _texts(hop: Document) -> tuple[str, str]:
    """Return a hop's (distance, limit) for the report, as `optimize explain` prints them; "" for no
    limit of the whole."""
    measured, limit = finite(_distance(hop)), finite(hop.get("tolerance"))
    if measured is not None and limit is not None:
        reached, allowed = (text.replace("-", "−") for text in write_breach(measured, limit))
        return reached, f"none: {limit:.3g} accepts zeros" if limit >= WHOLE else allowed
    allowed = "" if hop.get("tolerance") is None else plain(hop.get("tolerance"))
    return (plain(_distance(hop)) if measured is None else f"{measured:.2g}"), allowed


def _row(hop: Document) -> tuple[Line, ...]:
    unrun, why = _not_run(hop), hop.get("why")
    about = [Span(str(hop.get("hop")))]
    if hop.get("ok") is False:
        about.append(Span(" beyond its limit", "bad"))
    about += small(f"from {hop.get('from')}", str(why) if why and not unrun else "")
    if unrun:
        return line(*about), line(Span(f"not run here: {why}", "missing"))
    measured = get_part(hop, "measured")
    reached, limit = _texts(hop)
    over, worst = describe_examples(str(hop.get("hop"))), finite(measured.get("worst_example"))
    aside = "" if over == WORST or worst is None else f"worst example {worst:.2g}, no limit"
    return (
        line(*about),
        *figures(reached, limit or "–"),
        line(over, *small(aside)),
        *figures(plain(measured.get("max_abs")), plain(measured.get("cosine"))),
    )
