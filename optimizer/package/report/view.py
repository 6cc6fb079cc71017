"""What report.html shows, as plain values; templates/ says how each is drawn.

Everything here is text: a template escapes it, and nothing of a document becomes markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimizer.package.report.figures import NOT_A_NUMBER, NOT_MEASURED
from optimizer.package.report.plots import Chart


@dataclass(frozen=True)
class Span:
    """A piece of a line. style: one of templates/parts.html's `span`; href: what it links to."""

    text: str
    style: str = ""
    href: str = ""


Line = tuple[Span, ...]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph or an item of a list. style: its class, "missing", "bad" or "hint"."""

    line: Line
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first column heads its rows.

    A row of two cells in a wider table spans it. numbers: the right-aligned columns. stacked: on a
    narrow screen the first column stands above the others, where another table scrolls sideways.
    fold: the words that open it; "" where it is always open.
    """

    label: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    numbers: tuple[int, ...] = ()
    stacked: bool = False
    fold: str = ""


@dataclass(frozen=True)
class Card:
    """One question and its answer. legend: the names of the chart's colours, in their order."""

    title: str
    hint: str = ""
    chart: Chart | None = None
    legend: tuple[str, ...] = ()
    paragraphs: tuple[Paragraph, ...] = ()
    notes: tuple[Paragraph, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What a manager reads: ship a target or not, and the gates that stand against it."""

    target: str
    href: str
    badge: Span
    style: str
    gates: tuple[Paragraph, ...]
    sentence: str


@dataclass(frozen=True)
class TargetPart:
    """The cards of one target; those of one group stand side by side on a wide screen."""

    name: str
    anchor: str
    groups: tuple[tuple[Card, ...], ...]


@dataclass(frozen=True)
class Page:
    """report.html. verdict: of all targets together; provenance: (name, value) pairs; recipe: as
    JSON; bundled: whether the run made a bundle."""

    name: str
    verdict: str
    lead: str
    verdicts: tuple[Verdict, ...]
    targets: tuple[TargetPart, ...]
    provenance: tuple[tuple[str, str], ...]
    bundled: bool
    files: tuple[Table, ...]
    recipe: str


def line(*pieces: str | Span) -> Line:
    """Plain text and spans, one after another."""
    return tuple(p if isinstance(p, Span) else Span(p) for p in pieces)


def small(*texts: str) -> list[Span]:
    """Each on a line of its own under the text before; "" is left out."""
    return [Span(text, "small") for text in texts if text]


def figure(text: str) -> Span:
    """A figure; what is missing or is not a number stands out."""
    if text in (NOT_A_NUMBER, "infinite"):
        return Span(text, "bad")
    return Span(text, "missing" if text == NOT_MEASURED else "")


def badge(verdict: Any) -> Span:
    """A verdict as a coloured word."""
    word = str(verdict)
    known = word in ("pass", "fail", "inconclusive")
    return Span(word.upper(), f"badge {word}" if known else "badge")


def figures(*texts: str) -> tuple[Line, ...]:
    """A cell for each."""
    return tuple(line(figure(text)) for text in texts)


def missing(what: str, reason: str) -> Paragraph:
    """What was not measured, and why."""
    return Paragraph(line(Span(f"{what} not measured: ", "strong"), reason), "missing")


def not_drawn(names: list[str]) -> tuple[Paragraph, ...]:
    """What a chart leaves out because it has no number to draw."""
    text = f"Not drawn, no usable figure: {', '.join(names)}."
    return (Paragraph(line(text), "bad"),) if names else ()
