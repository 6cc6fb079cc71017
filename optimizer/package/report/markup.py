"""HTML and SVG as values, so that nothing reaches the page unescaped.

`tag` makes an element; what it is given as plain `str` is text and is escaped, what is already
`Html` is kept. There is no other way to make `Html` from a document's strings.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_VOID = frozenset({"meta", "br", "col"})
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Html(str):
    """Markup that may go into a page as it is."""

    __slots__ = ()


Child = str | None
Attribute = str | int | float | None


def escape(text: str) -> Html:
    """Text as markup. Control and bidirectional-override characters show as U+FFFD, for they
    could make a page read differently from what it says."""
    safe = _CONTROL.sub("\ufffd", text.encode("utf-8", "replace").decode("utf-8"))
    return Html(html.escape(safe, quote=True))


def join(children: Iterable[Child], between: str = "") -> Html:
    """Children one after another, None left out."""
    escaped = [c if isinstance(c, Html) else escape(c) for c in children if c is not None]
    return Html(escape(between).join(escaped))


def tag(name: str, *children: Child, **attributes: Attribute) -> Html:
    """<name attributes>children</name>.

    An attribute that is None is left out; `cls` is class; _ stands for - in a name (viewBox and
    the like keep their case). Numbers are written with at most two decimals.
    """
    written = ""
    for key, value in attributes.items():
        if value is None:
            continue
        key = "class" if key == "cls" else key.rstrip("_").replace("_", "-")
        text = value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
        written += f' {key}="{escape(text)}"'
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def table(
    heads: Sequence[Child],
    rows: Iterable[Sequence[Child]],
    *,
    label: str,
    numbers: Sequence[int],
    stacked: bool = False,
) -> Html:
    """A table whose first column heads its rows; `numbers` are the right-aligned columns.

    A row of two cells in a wider table spans it. On a narrow screen a table scrolls sideways
    within itself (by keyboard too); a stacked one puts its first column above the
    others instead. The roles keep it a table for a screen reader, whatever its display.
    """

    def cls(i: int) -> str | None:
        return "n" if i in numbers else None

    def line(row: Sequence[Child]) -> Html:
        span = len(heads) - 1 if len(row) == 2 < len(heads) else None
        cells = (
            tag("td", c, cls="wide" if span else cls(i), colspan=span, role="cell")
            for i, c in enumerate(row[1:], start=1)
        )
        return tag("tr", tag("th", row[0], scope="row", role="rowheader"), *cells, role="row")

    titles = (
        tag("th", h, cls=cls(i), scope="col", role="columnheader") for i, h in enumerate(heads)
    )
    inner = tag(
        "table",
        tag("thead", tag("tr", *titles, role="row"), role="rowgroup"),
        tag("tbody", *map(line, rows), role="rowgroup"),
        cls=f"stacked c{len(heads) - 1}" if stacked else None,
        role="table",
    )
    return tag("div", inner, cls="scroll", role="region", aria_label=label, tabindex="0")


def details(summary: str, *children: Child) -> Html:
    """A part that opens on demand."""
    return tag("details", tag("summary", summary), *children)
