"""Content of report.html as plain values, drawn by templates/.

Everything here is text, which the templates escape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimizer.package.report.figures import NOT_A_NUMBER, NOT_MEASURED
from optimizer.package.report.plots import Chart


@dataclass(frozen=True)
class Span:
    """Part of a line of the report page. style: as macro `span` in templates/parts.html reads it;
    href: link or ""."""

    text: str
    style: str = ""
    href: str = ""


Line = tuple[Span, ...]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph or an item of a list on the report page. style: its class, "missing", "bad" or
    "hint"."""

    line: Line
    style: str = ""


@dataclass(frozen=True)
class ReportTable:
    """Table of the report page whose first column heads its rows; the second of two cells spans a
    wider table.

    numbers: right-aligned columns
    stacked: True puts the first column above the others on a narrow screen, instead of scrolling
    fold: label that opens the table; "": always open
    about: explanation of the columns, above the table
    """

    label: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    numbers: tuple[int, ...] = ()
    stacked: bool = False
    fold: str = ""
    about: str = ""


@dataclass(frozen=True)
class Card:
    """Card of the report page, on one question. legend: names of the chart's colours, in order."""

    title: str
    hint: str = ""
    chart: Chart | None = None
    legend: tuple[str, ...] = ()
    paragraphs: tuple[Paragraph, ...] = ()
    notes: tuple[Paragraph, ...] = ()
    tables: tuple[ReportTable, ...] = ()


@dataclass(frozen=True)
class TargetVerdict:
    """Verdict on a target in the report. gates: those that did not pass, and warnings"""

    target: str
    href: str
    badge: Span
    style: str
    gates: tuple[Paragraph, ...]
    sentence: str


@dataclass(frozen=True)
class TargetPart:
    """Cards of the report page on one target; a group is side by side on a wide screen."""

    name: str
    anchor: str
    groups: tuple[tuple[Card, ...], ...]


@dataclass(frozen=True)
class Page:
    """Content of report.html.

    verdict: verdict of all targets together
    provenance: (name, value) pairs
    bundled: True where the run made a bundle
    recipe: JSON text
    """

    name: str
    verdict: str
    lead: str
    verdicts: tuple[TargetVerdict, ...]
    targets: tuple[TargetPart, ...]
    provenance: tuple[tuple[str, str], ...]
    bundled: bool
    files: tuple[ReportTable, ...]
    recipe: str


def line(*pieces: str | Span) -> Line:
    """Make a line of the report from plain text and spans."""
    return tuple(p if isinstance(p, Span) else Span(p) for p in pieces)


def small(*texts: str) -> list[Span]:
    """Return spans for the report page, each on a separate line below the text before it; "" is
    skipped."""
    return [Span(text, "small") for text in texts if text]


def figure(text: str) -> Span:
    """Return a number of the report, formatted, as a span, highlighted where it is missing or not
    finite."""
    if text in (NOT_A_NUMBER, "infinite"):
        return Span(text, "bad")
    return Span(text, "missing" if text == NOT_MEASURED else "")


def badge(verdict: Any) -> Span:
    """Make the coloured word in capitals by which the report shows a verdict."""
    word = str(verdict)
    known = word in ("pass", "fail", "inconclusive")
    return Span(word.upper(), f"badge {word}" if known else "badge")


def figures(*texts: str) -> tuple[Line, ...]:
    """Return one entry of a table in the report per formatted number, each as `figure` makes it."""
    return tuple(line(figure(text)) for text in texts)


def missing(what: str, reason: str) -> Paragraph:
    """Make the report's paragraph on a missing measurement and its reason."""
    return Paragraph(line(Span(f"{what} not measured: ", "strong"), reason), "missing")


def not_drawn(names: list[str]) -> tuple[Paragraph, ...]:
    """Return one paragraph on the names that a chart leaves out; () for no names."""
    text = f"Not drawn, no usable figure: {', '.join(names)}."
    return (Paragraph(line(text), "bad"),) if names else ()
