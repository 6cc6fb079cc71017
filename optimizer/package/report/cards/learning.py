"""Cards of training: loss on held-out texts over steps."""

from __future__ import annotations

from optimizer.package.report import plots
from optimizer.package.report.comparison import Document, get_part, get_parts
from optimizer.package.report.figures import NOT_MEASURED, finite
from optimizer.package.report.view import Card, Line, Paragraph, ReportTable, line

TITLES = {"recover": "Recovery of the smaller model", "qat": "Quantization-aware training"}


def build_cards(report: Document) -> tuple[Card, ...]:
    """Return one card of the report per training (recover, qat)."""
    return tuple(_card(training) for training in get_parts(report, "learned"))


def _card(training: Document) -> Card:
    title = TITLES.get(str(training.get("hop")), "Training")
    recorded = training.get("held_out")
    points = [
        (float(step), value)
        for step, number in (recorded if isinstance(recorded, list) else [])
        if (value := finite(number)) is not None
    ]
    best = min(points, key=lambda point: (point[1], point[0]), default=(0.0, 0.0))[0]
    start, end = get_part(training, "start"), get_part(training, "end")
    body = tuple((line(name), *map(_loss, (start.get(name), end.get(name)))) for name in start)
    stopped = str(training.get("stopped") or "")
    return Card(
        title,
        f"Loss on held-out texts over {training.get('steps')} steps; the weights with the lowest "
        "were kept.",
        plots.curve(points, best, title),
        paragraphs=(Paragraph(line(f"Stopped early: {stopped}"), "hint"),) if stopped else (),
        tables=(ReportTable("Losses on held-out texts", ("", "Before", "After"), body, (1, 2)),),
    )


def _loss(value: object) -> Line:
    number = finite(value)
    return line(NOT_MEASURED if number is None else f"{number:.4g}")
