"""The report's charts, drawn as inline SVG.

Positions across are percentages and heights are pixels, so a chart fills a phone or a desktop and
its text keeps its size. Only finite numbers are drawn; what was recorded and is not finite is said
in words by the caller. Every chart has a title and a description, and a table beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.package.report.figures import Writer, finite, ms
from optimizer.package.report.markup import Html, tag

GUTTER = 0.11  # of the width, for the numbers left of an axis
DOTS = 120  # of one strip; more would hide each other


@dataclass(frozen=True)
class Bar:
    """One row of a log chart: what was measured against what was allowed."""

    name: str
    value: float | None
    limit: float | None
    ok: bool
    text: str


def chart(title: str, description: str, height: float, *children: Html | None) -> Html:
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *children,
        role="img",
        aria_label=f"{title}. {description}",
        width="100%",
        height=height,
    )


def _at(fraction: float) -> str:
    """A position across: 0 and 1 lie just inside the edges. Outside 0..1 is drawn at the edge."""
    return f"{0.8 + 98.4 * min(max(fraction, 0.0), 1.0):.2f}%"


def _span(start: float, end: float) -> str:
    """The width from start to end, both clipped to 0..1."""
    a, b = (min(max(f, 0.0), 1.0) for f in (start, end))
    return f"{98.4 * max(b - a, 0.0):.2f}%"


def _label(fraction: float, y: float, text: str, cls: str = "") -> Html:
    """Text at a position, turned inwards near the edges."""
    anchor = "" if fraction < 0.3 else "end" if fraction > 0.7 else "mid"
    return tag("text", text, x=_at(fraction), y=y, cls=f"{cls} {anchor}".strip() or None)


def _row(y: float, left: str, right: str, cls: str = "soft", most: int = 30) -> tuple[Html, Html]:
    """The two texts above a bar; `left` is cut when it would meet `right` on a phone."""
    room = max(most - max(len(right) - 18, 0), 12)
    shown = left if len(left) <= room else left[: room - 1] + "…"
    return (
        tag("text", shown, x="0.8%", y=y, cls="strong"),
        tag("text", right, x="99.2%", y=y, cls=f"end {cls}"),
    )


def _vertical(fraction: float, top: float, bottom: float, cls: str) -> Html:
    x = _at(fraction)
    return tag("line", x1=x, x2=x, y1=top, y2=bottom, cls=cls)


def _horizontal(start: float, end: float, y: float, cls: str) -> Html:
    return tag("line", x1=_at(start), x2=_at(end), y1=y, y2=y, cls=cls)


def _ticks(most: float) -> list[float]:
    """Three to six round values from 0 to `most`."""
    raw = most / 6
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def difference(
    value: float, bounds: tuple[float, float], margin: float, write: Writer, title: str
) -> Html:
    """The change of a metric with its interval, against the largest drop allowed.

    value, bounds: candidate - baseline; margin > 0. Left of -margin is the zone of failure.
    """
    low, high = bounds
    left, right = min(-margin, low), max(0.0, high)
    reach = right - left
    left, right = left - 0.22 * reach, right + 0.12 * reach

    def across(x: float) -> float:
        return (x - left) / (right - left)

    return chart(
        title,
        f"{write(value)}, interval {write(low)} to {write(high)}; {write(-margin)} is allowed.",
        104,
        tag("rect", x=_at(0), y=26, width=_span(0, across(-margin)), height=34, cls="zone"),
        _vertical(across(-margin), 22, 66, "limit"),
        _vertical(across(0), 22, 80, "rule"),
        _horizontal(across(low), across(high), 42, "candidate whisker"),
        _vertical(across(low), 36, 48, "candidate whisker"),
        _vertical(across(high), 36, 48, "candidate whisker"),
        tag("circle", cx=_at(across(value)), cy=42, r=5.5, cls="candidate"),
        _label(across(value), 14, write(value), "strong"),
        _label(across(-margin), 80, f"{write(-margin)} allowed", "soft"),
        _label(across(0), 96, "same as float", "soft"),
    )


def latency(systems: Mapping[str, tuple[str, Mapping[str, Any]]], title: str) -> Html | None:
    """A strip of every timed run per system, with quartiles, median and p99, in milliseconds.

    systems: shown name -> (css class, the report's end_to_end). None when no median is positive.
    """
    known = {n: (c, e) for n, (c, e) in systems.items() if (finite(e.get("p50")) or 0) > 0}
    if not known:
        return None
    most = 1.06 * max(finite(e.get(p)) or 0.0 for _, e in known.values() for p in ("p50", "p99"))
    parts: list[Html | None] = []
    y = 0.0
    for name, (cls, e) in known.items():
        right = f"p50 {_number(e.get('p50'))} · p99 {ms(e.get('p99'))}"
        parts += [*_row(y + 12, name, right), *_strip(e, cls, y + 32, most)]
        y += 54
    ticks = [_vertical(t / most, 18, y, "axis") for t in _ticks(most)]
    labels = [_label(t / most, y + 14, f"{t:g}", "soft") for t in _ticks(most)[:-1]]
    labels.append(_label(_ticks(most)[-1] / most, y + 14, f"{_ticks(most)[-1]:g} ms", "soft"))
    description = "; ".join(
        f"{n}: p50 {ms(e.get('p50'))}, p99 {ms(e.get('p99'))}" for n, (_, e) in known.items()
    )
    return chart(title, description, y + 22, *ticks, *parts, *labels)


def _number(value: Any) -> str:
    return ms(value).removesuffix(" ms")


def _strip(e: Mapping[str, Any], cls: str, y: float, most: float) -> list[Html]:
    recorded = e.get("samples")
    numbers = map(finite, recorded if isinstance(recorded, list) else [])
    samples = sorted(s for s in numbers if s is not None and s > 0)
    step = max(len(samples) / DOTS, 1.0)
    shown = [samples[int(i * step)] for i in range(int(len(samples) / step))]
    dots = [
        tag("circle", cx=_at(s / most), cy=y + (i * 7 % 5 - 2) * 2.6, r=2.2, cls=f"{cls} dot")
        for i, s in enumerate(shown)
        if s <= most
    ]
    p50, p99 = finite(e.get("p50")) or 0.0, finite(e.get("p99"))
    marks = [_vertical(p50 / most, y - 11, y + 11, f"{cls} median")]
    if len(samples) >= 5:
        low, high = (samples[int(q * (len(samples) - 1))] / most for q in (0.25, 0.75))
        marks.append(
            tag("rect", x=_at(low), y=y - 8, width=_span(low, high), height=16, cls=f"{cls} box")
        )
    if p99 is not None:
        marks.append(_horizontal(p50 / most, p99 / most, y, f"{cls} whisker"))
        marks.append(_vertical(p99 / most, y - 6, y + 6, f"{cls} whisker"))
    return [*dots, *marks]


def stages(systems: Mapping[str, Mapping[str, float]], title: str) -> Html | None:
    """One stacked bar of median milliseconds per system. systems: name -> {stage: ms}."""
    totals = {n: sum(s.values()) for n, s in systems.items()}
    most = max(totals.values(), default=0.0)
    if most <= 0:
        return None
    order = list(dict.fromkeys(stage for s in systems.values() for stage in s))
    parts: list[Html] = []
    y = 0.0
    for name, values in systems.items():
        parts += _row(y + 12, name, ms(totals[name]))
        done = 0.0
        for i, stage in enumerate(order):
            part = values.get(stage, 0.0)
            place = {"x": _at(done / most), "width": _span(done / most, (done + part) / most)}
            hover = tag("title", f"{stage}: {ms(part)}")
            parts.append(tag("rect", hover, y=y + 18, height=14, cls=f"stage{min(i, 4)}", **place))
            done += part
        y += 44
    description = "; ".join(
        f"{n}: " + ", ".join(f"{stage} {ms(v)}" for stage, v in s.items())
        for n, s in systems.items()
    )
    return chart(title, description, y, *parts)


def log_bars(rows: Sequence[Bar], title: str) -> Html | None:
    """Bars on a logarithmic scale, each with a mark at its limit. None when nothing is drawable."""
    values = [v for r in rows for v in (r.value, r.limit) if v is not None and v > 0]
    if not values:
        return None
    low = math.floor(math.log10(min(values))) - 0.5
    high = math.ceil(math.log10(max(values))) + 0.2

    def across(x: float) -> float:
        return (math.log10(x) - low) / (high - low)

    parts: list[Html] = []
    y = 0.0
    for r in rows:
        parts += _row(y + 12, r.name, r.text, "soft" if r.ok else "over")
        parts.append(tag("rect", x=_at(0), y=y + 18, width=_span(0, 1), height=12, cls="track"))
        if r.value is not None and r.value > 0:
            cls = "fine" if r.ok else "over"
            width = _span(0, across(r.value))
            parts.append(tag("rect", x=_at(0), y=y + 18, width=width, height=12, cls=cls))
        if r.limit is not None and r.limit > 0:
            parts.append(_vertical(across(r.limit), y + 15, y + 33, "limit"))
        y += 46
    step = max(math.ceil((high - low) / 5), 1)
    decades = range(math.ceil(low), math.floor(high) + 1, step)
    labels = [_label(across(10.0**d), y + 10, f"1e{d}".replace("-", "−"), "soft") for d in decades]
    description = "; ".join(f"{r.name}: {r.text}" for r in rows)
    return chart(title, description, y + 18, *parts, *labels)


def columns(values: Sequence[tuple[str, float]], title: str, worst: int) -> Html | None:
    """One column per module, in the order given; the `worst` highest are marked, the first named.

    A change of the first number in the names (the block) draws a separator with that number.
    """
    most = max((v for _, v in values), default=0.0)
    if most <= 0:
        return None
    floor, height = 150.0, 122.0
    width = (1 - GUTTER) / len(values)
    marked = sorted(range(len(values)), key=lambda i: -values[i][1])[:worst]
    parts: list[Html] = []
    for tick in _ticks(most)[1:]:
        y = floor - height * tick / most
        parts.append(tag("line", x1=_at(GUTTER), x2=_at(1), y1=y, y2=y, cls="axis"))
        parts.append(tag("text", f"{tick:g}", x=_at(GUTTER - 0.01), y=y + 4, cls="end soft"))
    for i, (name, v) in enumerate(values):
        tall = height * max(v, 0.0) / most
        cls = "over" if i in marked else "fine faint"
        place = {"x": _at(GUTTER + (i + 0.12) * width), "width": _span(0, 0.76 * width)}
        hover = tag("title", f"{name}: {v:.4g}")
        parts.append(tag("rect", hover, y=floor - tall, height=tall, cls=cls, **place))
    parts.append(tag("line", x1=_at(GUTTER), x2=_at(1), y1=floor, y2=floor, cls="axis"))
    top = marked[0]
    parts.append(_label(GUTTER + (top + 0.5) * width, 14, _ending(values[top][0]), "strong"))
    parts += _blocks([n for n, _ in values], width, floor)
    description = "worst: " + ", ".join(f"{values[i][0]} {values[i][1]:.4g}" for i in marked)
    return chart(title, description, floor + 40, *parts)


def _ending(name: str, most: int = 38) -> str:
    return name if len(name) <= most else "…" + name[-(most - 1) :]


def _blocks(names: Sequence[str], width: float, floor: float) -> list[Html]:
    """Separators where the block number changes, the number under the middle of its block."""
    numbers = [m.group(1) if (m := re.search(r"\.(\d+)(?:\.|$)", n)) else "" for n in names]
    starts = [i for i, b in enumerate(numbers) if i == 0 or b != numbers[i - 1]]
    every = max(math.ceil(len(starts) / 12), 1)
    marks: list[Html] = []
    for k, (start, end) in enumerate(zip(starts, [*starts[1:], len(names)], strict=True)):
        if start:
            marks.append(_vertical(GUTTER + start * width, floor, floor + 6, "axis"))
        if numbers[start] and k % every == 0:
            x = _at(GUTTER + (start + end) / 2 * width)
            marks.append(tag("text", numbers[start], x=x, y=floor + 18, cls="mid soft"))
    if any(numbers):
        marks.append(tag("text", "block", x=_at((1 + GUTTER) / 2), y=floor + 35, cls="mid soft"))
    return marks
