"""Lay out the report's charts: positions of bars, dots and labels. templates/chart.html draws them.

Horizontal positions are percentages and heights are pixels, so a chart fits any screen while text
keeps its size. Only finite numbers are drawn; callers list others in words. Every chart has a
title, a description and a table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from optimizer.package.report.figures import Writer, finite, ms

GUTTER = 0.11  # share of the width for the numbers left of an axis
DOTS = 120  # maximum dots in a strip; more would overlap


@dataclass(frozen=True)
class Rect:
    """Rectangle of a chart in the report. x, width: "12.50%"; y, height: pixels; hover: tooltip."""

    shape: ClassVar[str] = "rect"
    x: str
    y: float
    width: str
    height: float
    style: str
    hover: str = ""


@dataclass(frozen=True)
class Stroke:
    """A line of a chart in the report, from (x1, y1) to (x2, y2)."""

    shape: ClassVar[str] = "stroke"
    x1: str
    x2: str
    y1: float
    y2: float
    style: str


@dataclass(frozen=True)
class Dot:
    """Dot at a position of a chart in the report."""

    shape: ClassVar[str] = "dot"
    x: str
    y: float
    radius: float
    style: str


@dataclass(frozen=True)
class ChartText:
    """Text at a position of a chart in the report."""

    shape: ClassVar[str] = "label"
    text: str
    x: str
    y: float
    style: str = ""


Shape = Rect | Stroke | Dot | ChartText


@dataclass(frozen=True)
class Chart:
    """Chart of the report: shapes in drawing order; height: pixels."""

    title: str
    description: str
    height: float
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Bar:
    """Row of a logarithmic chart of the report: a measured value and its limit."""

    name: str
    value: float | None
    limit: float | None
    ok: bool
    text: str


@dataclass(frozen=True)
class Point:
    """A candidate in a chart of the report over two figures, with an interval of each. name: label,
    or ""."""

    name: str
    x: float
    y: float
    x_interval: tuple[float | None, float | None]
    y_interval: tuple[float | None, float | None]
    style: str


def style(system: str, baseline: str | None) -> str:
    """Return a system's style in the report's charts: "candidate", "baseline" for the name
    `baseline`, or "other"."""
    if system == "candidate":
        return "candidate"
    return "baseline" if system == baseline else "other"


def _at(fraction: float) -> str:
    """Return a fraction as a position in a chart of the report, "12.50%"; 0 and 1 lie just inside
    the edges; clipped."""
    return f"{0.8 + 98.4 * min(max(fraction, 0.0), 1.0):.2f}%"


def _span(start: float, end: float) -> str:
    """Return the width of a chart's bar from start to end, fractions clipped to 0..1, as
    "12.50%"."""
    a, b = (min(max(f, 0.0), 1.0) for f in (start, end))
    return f"{98.4 * max(b - a, 0.0):.2f}%"


def _label(fraction: float, y: float, text: str, style: str = "") -> ChartText:
    """Make the text at a position of a chart of the report, aligned inwards near the edges."""
    anchor = "" if fraction < 0.3 else "end" if fraction > 0.7 else "mid"
    return ChartText(text, _at(fraction), y, f"{style} {anchor}".strip())


def _row(
    y: float, left: str, right: str, style: str = "soft", most: int = 30
) -> tuple[ChartText, ChartText]:
    """Return the two texts above a bar of a chart in the report; `left` is cut to at most `most`
    characters for a phone."""
    room = max(most - max(len(right) - 18, 0), 12)
    shown = left if len(left) <= room else left[: room - 1] + "…"
    return ChartText(shown, "0.8%", y, "strong"), ChartText(right, "99.2%", y, f"end {style}")


def _vertical(fraction: float, top: float, bottom: float, style: str) -> Stroke:
    return Stroke(_at(fraction), _at(fraction), top, bottom, style)


def _horizontal(start: float, end: float, y: float, style: str) -> Stroke:
    return Stroke(_at(start), _at(end), y, y, style)


def _ticks(most: float) -> list[float]:
    """Choose the values of an axis of the report's charts: four to seven round values from 0 up to
    `most`, which is above 0."""
    raw = most / 6
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def difference(
    value: float, bounds: tuple[float, float], margin: float, write: Writer, title: str
) -> Chart:
    """Draw for the report the change of a metric with its interval, and the margin.

    value, bounds: candidate - baseline
    margin: largest drop allowed, above 0; left of -margin is the zone of failure
    """
    low, high = bounds
    left, right = min(-margin, low), max(0.0, high)
    reach = right - left
    left, right = left - 0.22 * reach, right + 0.12 * reach

    def across(x: float) -> float:
        return (x - left) / (right - left)

    shapes = (
        Rect(_at(0), 26, _span(0, across(-margin)), 34, "zone"),
        _vertical(across(-margin), 22, 66, "limit"),
        _vertical(across(0), 22, 80, "rule"),
        _horizontal(across(low), across(high), 42, "candidate whisker"),
        _vertical(across(low), 36, 48, "candidate whisker"),
        _vertical(across(high), 36, 48, "candidate whisker"),
        Dot(_at(across(value)), 42, 5.5, "candidate"),
        _label(across(value), 14, write(value), "strong"),
        _label(across(-margin), 80, f"{write(-margin)} allowed", "soft"),
        _label(across(0), 96, "same as float", "soft"),
    )
    text = f"{write(value)}, interval {write(low)} to {write(high)}; {write(-margin)} is allowed."
    return Chart(title, text, 104, shapes)


def latency(systems: Mapping[str, tuple[str, Mapping[str, Any]]], title: str) -> Chart | None:
    """Draw for the report a strip of timed runs per system, with quartiles, median and p99, in
    milliseconds; None where no median is positive.

    systems: {display name: (style, end_to_end of the report)}
    """
    known = {n: (c, e) for n, (c, e) in systems.items() if (finite(e.get("p50")) or 0) > 0}
    if not known:
        return None
    most = 1.06 * max(finite(e.get(p)) or 0.0 for _, e in known.values() for p in ("p50", "p99"))
    shapes: list[Shape] = []
    y = 0.0
    for name, (style, e) in known.items():
        right = f"p50 {_number(e.get('p50'))} · p99 {ms(e.get('p99'))}"
        shapes += [*_row(y + 12, name, right), *_strip(e, style, y + 32, most)]
        y += 54
    ticks = [_vertical(t / most, 18, y, "axis") for t in _ticks(most)]
    labels = [_label(t / most, y + 14, f"{t:g}", "soft") for t in _ticks(most)[:-1]]
    labels.append(_label(_ticks(most)[-1] / most, y + 14, f"{_ticks(most)[-1]:g} ms", "soft"))
    description = "; ".join(
        f"{n}: p50 {ms(e.get('p50'))}, p99 {ms(e.get('p99'))}" for n, (_, e) in known.items()
    )
    return Chart(title, description, y + 22, (*ticks, *shapes, *labels))


def _number(value: Any) -> str:
    return ms(value).removesuffix(" ms")


def _strip(e: Mapping[str, Any], style: str, y: float, most: float) -> list[Shape]:
    recorded = e.get("samples")
    numbers = map(finite, recorded if isinstance(recorded, list) else [])
    samples = sorted(s for s in numbers if s is not None and s > 0)
    step = max(len(samples) / DOTS, 1.0)
    shown = [samples[int(i * step)] for i in range(int(len(samples) / step))]
    dots = [
        Dot(_at(s / most), y + (i * 7 % 5 - 2) * 2.6, 2.2, f"{style} dot")
        for i, s in enumerate(shown)
        if s <= most
    ]
    p50, p99 = finite(e.get("p50")) or 0.0, finite(e.get("p99"))
    marks: list[Shape] = [_vertical(p50 / most, y - 11, y + 11, f"{style} median")]
    if len(samples) >= 5:
        low, high = (samples[int(q * (len(samples) - 1))] / most for q in (0.25, 0.75))
        marks.append(Rect(_at(low), y - 8, _span(low, high), 16, f"{style} box"))
    if p99 is not None:
        marks.append(_horizontal(p50 / most, p99 / most, y, f"{style} whisker"))
        marks.append(_vertical(p99 / most, y - 6, y + 6, f"{style} whisker"))
    return [*dots, *marks]


def stages(systems: Mapping[str, Mapping[str, float]], title: str) -> Chart | None:
    """Draw for the report a stacked bar per system; None if all are 0. systems: {name: {stage:
    median ms}}."""
    totals = {n: sum(s.values()) for n, s in systems.items()}
    most = max(totals.values(), default=0.0)
    if most <= 0:
        return None
    order = list(dict.fromkeys(stage for s in systems.values() for stage in s))
    shapes: list[Shape] = []
    y = 0.0
    for name, values in systems.items():
        shapes += _row(y + 12, name, ms(totals[name]))
        done = 0.0
        for i, stage in enumerate(order):
            part = values.get(stage, 0.0)
            width = _span(done / most, (done + part) / most)
            hover = f"{stage}: {ms(part)}"
            shapes.append(Rect(_at(done / most), y + 18, width, 14, f"stage{min(i, 4)}", hover))
            done += part
        y += 44
    description = "; ".join(
        f"{n}: " + ", ".join(f"{stage} {ms(v)}" for stage, v in s.items())
        for n, s in systems.items()
    )
    return Chart(title, description, y, tuple(shapes))


def log_bars(rows: Sequence[Bar], title: str) -> Chart | None:
    """Draw for the report bars on a logarithmic scale, with marks at the limits; None without
    positive values."""
    values = [v for r in rows for v in (r.value, r.limit) if v is not None and v > 0]
    if not values:
        return None
    low = math.floor(math.log10(min(values))) - 0.5
    high = math.ceil(math.log10(max(values))) + 0.2

    def across(x: float) -> float:
        return (math.log10(x) - low) / (high - low)

    shapes: list[Shape] = []
    y = 0.0
    for r in rows:
        shapes += _row(y + 12, r.name, r.text, "soft" if r.ok else "over")
        shapes.append(Rect(_at(0), y + 18, _span(0, 1), 12, "track"))
        if r.value is not None and r.value > 0:
            width = _span(0, across(r.value))
            shapes.append(Rect(_at(0), y + 18, width, 12, "fine" if r.ok else "over"))
        if r.limit is not None and r.limit > 0:
            shapes.append(_vertical(across(r.limit), y + 15, y + 33, "limit"))
        y += 46
    step = max(math.ceil((high - low) / 5), 1)
    decades = range(math.ceil(low), math.floor(high) + 1, step)
    labels = [_label(across(10.0**d), y + 10, f"1e{d}".replace("-", "−"), "soft") for d in decades]
    description = "; ".join(f"{r.name}: {r.text}" for r in rows)
    return Chart(title, description, y + 18, (*shapes, *labels))


def columns(values: Sequence[tuple[str, float]], title: str, worst: int) -> Chart | None:
    """Draw for the report one column per (module, value), the `worst` highest marked, the highest
    named; None without a value above 0. Separators show where the block, a number in the names,
    changes."""
    most = max((v for _, v in values), default=0.0)
    if most <= 0:
        return None
    floor, height = 150.0, 122.0
    width = (1 - GUTTER) / len(values)
    marked = sorted(range(len(values)), key=lambda i: -values[i][1])[:worst]
    shapes: list[Shape] = []
    for tick in _ticks(most)[1:]:
        y = floor - height * tick / most
        shapes.append(_horizontal(GUTTER, 1, y, "axis"))
        shapes.append(ChartText(f"{tick:g}", _at(GUTTER - 0.01), y + 4, "end soft"))
    for i, (name, v) in enumerate(values):
        tall = height * max(v, 0.0) / most
        style = "over" if i in marked else "fine faint"
        x = _at(GUTTER + (i + 0.12) * width)
        hover = f"{name}: {v:.4g}"
        shapes.append(Rect(x, floor - tall, _span(0, 0.76 * width), tall, style, hover))
    shapes.append(_horizontal(GUTTER, 1, floor, "axis"))
    top = marked[0]
    shapes.append(_label(GUTTER + (top + 0.5) * width, 14, _ending(values[top][0]), "strong"))
    shapes += _blocks([n for n, _ in values], width, floor)
    description = "worst: " + ", ".join(f"{values[i][0]} {values[i][1]:.4g}" for i in marked)
    return Chart(title, description, floor + 40, tuple(shapes))


def curve(points: Sequence[tuple[float, float]], best: float, title: str) -> Chart | None:
    """Draw for the report values over training steps on a logarithmic scale; None with fewer than
    two positive values.

    points: (step, value)
    best: step of the weights kept, marked
    """
    known = [(s, v) for s, v in points if math.isfinite(v) and v > 0]
    if len(known) < 2:
        return None
    last = max(s for s, _ in known)
    low, high = (math.log10(f(v for _, v in known)) for f in (min, max))
    reach = max(high - low, 1e-9)
    floor, height = 150.0, 112.0

    def place(point: tuple[float, float]) -> tuple[float, float]:
        share = (math.log10(point[1]) - low) / reach
        return GUTTER + (1 - GUTTER) * point[0] / last, floor - 12 - height * share

    shapes: list[Shape] = [_horizontal(GUTTER, 1, floor, "axis")]
    for before, after in pairwise(known):
        (x1, y1), (x2, y2) = place(before), place(after)
        shapes.append(Stroke(_at(x1), _at(x2), y1, y2, "candidate whisker"))
    for end in (known[0], min(known, key=lambda p: p[1])):
        x, y = place(end)
        shapes.append(ChartText(f"{end[1]:.3g}", _at(GUTTER - 0.01), y + 4, "end soft"))
    kept = next((p for p in known if p[0] == best), known[-1])
    x, y = place(kept)
    shapes += [Dot(_at(x), y, 5.5, "candidate"), _label(x, floor + 16, f"step {best:g}", "soft")]
    text = f"from {known[0][1]:.4g} to {kept[1]:.4g} at step {best:g} of {last:g}"
    return Chart(title, text, floor + 24, tuple(shapes))


def pareto(points: Sequence[Point], margin: float, title: str, unit: str) -> Chart | None:
    """Draw for a search's report points with the intervals of both figures, and the margin of the
    vertical one, which grows upwards; None without points. unit: of the horizontal figure"""
    if not points:
        return None
    ends = [[e for p in points for e in (*p.x_interval, p.x) if e is not None]]
    ends.append([e for p in points for e in (*p.y_interval, p.y, margin, 0.0) if e is not None])
    (left, right), (top, bottom) = ((min(e), max(e)) for e in ends)
    wide, tall = max(right - left, 1e-9), max(bottom - top, 1e-9)
    floor, height = 230.0, 200.0

    def across(x: float) -> float:
        return GUTTER + 0.02 + (0.96 - GUTTER) * (x - left) / wide

    def down(y: float) -> float:
        return floor - height * (y - top) / tall

    shapes: list[Shape] = [
        _horizontal(GUTTER, 1, floor + 8, "axis"),
        _horizontal(GUTTER, 1, down(margin), "limit"),
        ChartText("margin", _at(GUTTER - 0.01), down(margin) + 4, "end soft"),
        _horizontal(GUTTER, 1, down(0.0), "rule"),
        ChartText("0", _at(GUTTER - 0.01), down(0.0) + 4, "end soft"),
    ]
    ends_of_axis = ((value, f"{value:.3g} {unit}") for value in (left, right))
    shapes += [_label(across(value), floor + 24, text, "soft") for value, text in ends_of_axis]
    for p in points:
        (x1, x2), (y1, y2) = p.x_interval, p.y_interval
        x1, x2 = p.x if x1 is None else x1, p.x if x2 is None else x2
        y1, y2 = p.y if y1 is None else y1, p.y if y2 is None else y2
        whisker = f"{p.style} whisker"
        shapes.append(_horizontal(across(x1), across(x2), down(p.y), whisker))
        shapes.append(_vertical(across(p.x), down(y2), down(y1), whisker))
        shapes.append(Dot(_at(across(p.x)), down(p.y), 4.5, p.style))
        if p.name:
            shapes.append(_label(across(p.x), down(p.y) - 8, _ending(p.name), "strong"))
    described = "; ".join(
        f"{p.name or 'candidate'}: {p.x:.4g} {unit}, drop {p.y:.4g}" for p in points
    )
    return Chart(title, described, floor + 32, tuple(shapes))


def _ending(name: str, most: int = 38) -> str:
    return name if len(name) <= most else "…" + name[-(most - 1) :]


def _blocks(names: Sequence[str], width: float, floor: float) -> list[Shape]:
    """Return the axis of the report's chart over modules: separators between the model's blocks,
    and at most 12 block numbers under the middles of their blocks."""
    numbers = [m.group(1) if (m := re.search(r"\.(\d+)(?:\.|$)", n)) else "" for n in names]
    starts = [i for i, b in enumerate(numbers) if i == 0 or b != numbers[i - 1]]
    every = max(math.ceil(len(starts) / 12), 1)
    marks: list[Shape] = []
    for k, (start, end) in enumerate(zip(starts, [*starts[1:], len(names)], strict=True)):
        if start:
            marks.append(_vertical(GUTTER + start * width, floor, floor + 6, "axis"))
        if numbers[start] and k % every == 0:
            x = _at(GUTTER + (start + end) / 2 * width)
            marks.append(ChartText(numbers[start], x, floor + 18, "mid soft"))
    if any(numbers):
        marks.append(ChartText("block", _at((1 + GUTTER) / 2), floor + 35, "mid soft"))
    return marks
