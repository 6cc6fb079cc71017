"""Compare float and quantized, as rows of text for report.html and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.package.report.figures import (
    NOT_MEASURED,
    Writer,
    change,
    finite,
    interval,
    level,
    ms,
    plain,
    size,
    times,
    title,
)
from optimizer.recipe.compression.methods import METHODS, RENAMED

Document = Mapping[str, Any]
PAIRED = (
    "The change of a p50 is the mean of the ratios in several openings of both systems, which run "
    "in turns, not the ratio of the two p50s."
)
TORCH = "torch-float"
SYSTEMS = {
    TORCH: "PyTorch float",
    "onnxruntime-float": "ONNX Runtime float",
    "openvino-float": "OpenVINO float",
    "openvino-float-bf16": "OpenVINO float in bf16",
    "openvino-float-fp16": "OpenVINO float in fp16",
    "tensorrt-rtx-float": "TensorRT-RTX float",
}


@dataclass(frozen=True)
class TableEntry:
    """Entry of a table in the report: text of a number, and a note below it, such as an interval or
    a reason."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class TableRow:
    """Row of the report's comparison: entries of float, of the candidate, and of the change."""

    name: str
    before: TableEntry
    after: TableEntry
    change: TableEntry = TableEntry("")

    @property
    def unmeasured(self) -> bool:
        """True for a row of the report's table where neither float nor candidate was measured; the
        reason is in the entries' notes."""
        return self.before.text == self.after.text == NOT_MEASURED


def get_part(holder: Any, key: str) -> Document:
    """Return the object holder[key] of a report in JSON; {} where it is missing or not an
    object."""
    value = holder.get(key) if isinstance(holder, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def get_parts(holder: Any, key: str) -> list[Document]:
    """Return the objects in the list holder[key] of a report in JSON; [] where it is missing or not
    a list."""
    value = holder.get(key) if isinstance(holder, Mapping) else None
    return [p for p in value if isinstance(p, Mapping)] if isinstance(value, list) else []


def list_warnings(report: Document) -> list[str]:
    """Return the warnings about the data and the float model, each once, with the place in the
    recipe of the data that one is about."""
    sense = get_part(report, "sense")
    sentences = [str(w) for w in get_part(sense, "reference").get("warnings", ())]
    for sets in (part for part in sense.values() if isinstance(part, Mapping)):
        for measured in (m for m in sets.values() if isinstance(m, Mapping)):
            sentences += map(str, measured.get("warnings", ()))
    return list(dict.fromkeys(sentences))


def sort_gates(report: Document) -> list[Document]:
    """Sort the report's gates: failed and not measured first, then inconclusive, then passed."""
    rank = {"inconclusive": 1, "pass": 2}
    return sorted(get_parts(report, "gates"), key=lambda g: rank.get(str(g.get("verdict")), 0))


def explain_missing(report: Document, section: str) -> str:
    """Return the reason why a section of the report has no measurement, from
    report["not_measured"][section], report[section]["not_measured"] or the target's deferred
    engine."""
    reason = get_part(report, "not_measured").get(section) or get_part(report, section).get(
        "not_measured"
    )
    engine = get_part(report, "engine")
    if not reason and (engine.get("deferred") or report.get("deferred")):
        reason = engine.get("why") or report.get("why") or "the engine was not built here"
    return str(reason) if reason else "the report gives no reason"


def name_candidate(recipe: Any) -> str:
    """Name a recipe's candidate in the report: "INT8", "INT4 weights", "2:4 sparse", ..."""
    section = get_part(recipe, "quantize")
    names = (section.get("method"), *(section.get("methods") or ()))
    known = [METHODS.get(RENAMED.get(name, name)) for name in names if name]
    if any(m is not None and m.kind == "pass-through" for m in known):
        return "original integers"  # the recipe does not say the bits of the checkpoint's
    sparsity = get_part(recipe, "sparsity")
    if sparsity and any(m is not None and m.kind == "float" for m in known):
        return f"{sparsity.get('pattern')} sparse"
    weights = get_part(section, "weights")
    bits = weights.get("bits")
    if bits is None:
        return "quantized"
    name = f"FP{bits}" if weights.get("type", "int") != "int" else f"INT{bits}"
    return name if section.get("activations") else f"{name} weights"


def system(name: str, recipe: Any) -> str:
    """Return the display name of a system, of "candidate" by the recipe; else the name itself."""
    return name_candidate(recipe) if name == "candidate" else SYSTEMS.get(name, name)


def baseline(cell: Document, target: str) -> str | None:
    """Return the name of the float system that the report compares a cell's candidate is compared
    with: the system in its ratio, else the same runtime's, else ONNX Runtime's, else the first;
    None without any."""
    others = [n for n in get_part(cell, "systems") if n != "candidate"]
    compared = str(get_part(cell, "ratio").get("to", ""))
    for float_target in (compared, f"{target.rsplit('-', 1)[0]}-float", "onnxruntime-float"):
        if float_target in others:
            return float_target
    return others[0] if others else None


def build_cell(value: Any, write: Writer, bounds: Any = None) -> TableEntry:
    """Return a cell of the report's table: `value` written by `write`, and its interval `bounds` as
    the note."""
    return TableEntry(write(value), interval(bounds, write, unit=False))


def quality_rows(report: Document) -> list[TableRow]:
    """Return the report's rows on the metric (not perplexity) and cosine; one with the reason if
    unmeasured."""
    quality = get_part(report, "quality")
    if not quality.get("metric"):
        gap = TableEntry(NOT_MEASURED, explain_missing(report, "quality"))
        return [TableRow("Quality", gap, gap)]
    metric = str(quality["metric"])
    value, differ = level(metric), change(metric)
    before, after, moved = (get_part(quality, k) for k in ("baseline", "candidate", "difference"))
    rows = [
        TableRow(
            title(metric),
            build_cell(before.get("value"), value, before.get("interval")),
            build_cell(after.get("value"), value, after.get("interval")),
            build_cell(moved.get("value"), differ, moved.get("interval")),
        )
    ]
    cosine = get_part(quality, "cosine")
    if cosine and metric != "cosine":
        write = level("cosine")
        lowest = TableEntry(write(cosine.get("mean")), f"lowest {write(cosine.get('min'))}")
        rows.append(TableRow("Cosine to float", TableEntry(""), lowest))
    return rows


def latency_rows(report: Document) -> list[TableRow]:
    """Return the report's rows on p50 and p99 of each batch x sequence; one with the reason if
    unmeasured."""
    cells = get_parts(get_part(report, "speed"), "cells")
    if not cells:
        gap = TableEntry(NOT_MEASURED, explain_missing(report, "speed"))
        return [TableRow("Latency", gap, gap)]
    rows = []
    for cell in cells:
        first = baseline(cell, str(report.get("target", "")))
        ends = [
            get_part(get_part(get_part(cell, "systems"), n), "end_to_end") if n else {}
            for n in (first, "candidate")
        ]
        for p in ("p50", "p99"):
            before, after = (build_cell(e.get(p), ms, e.get(f"{p}_interval")) for e in ends)
            ratio = get_part(cell, "ratio")
            moved = TableEntry(times(divide(ends[1].get(p), ends[0].get(p))))
            if p == "p50" and "median" in ratio:
                moved = build_cell(ratio["median"], times, ratio.get("interval"))
            name = f"{p}, batch {plain(cell.get('batch'))}{format_length(cell)}"
            rows.append(TableRow(name, before, after, moved))
    return rows


def paired_note(report: Document) -> str:
    """Return the note PAIRED for the report's table where its ratio of times comes from openings,
    else ""."""
    ratios = [get_part(cell, "ratio") for cell in get_parts(get_part(report, "speed"), "cells")]
    return PAIRED if any(ratios) else ""


def format_length(cell: Document) -> str:
    """Return for the report a timing cell's sequence length as " × 128"; "" for 1, inputs of one
    size."""
    sequence = cell.get("sequence")
    return "" if sequence == 1 else f" × {plain(sequence)}"


def divide(after: Any, before: Any) -> float | None:
    """Return a change for the report, after / before; None where either is not a finite number, or
    `before` is 0."""
    a, b = finite(after), finite(before)
    return a / b if a is not None and b else None


def size_rows(report: Document) -> list[TableRow]:
    """Return the rows of the report's table on the size of the model file and on peak memory."""
    speed = get_part(report, "speed")
    rows = []
    for key, name in (("size", "Model file"), ("peak_memory", "Peak memory")):
        holder = get_part(speed, key) or get_part(report, key)
        before, after = _pair(holder, str(report.get("target", "")))
        moved = TableEntry(times(divide(after, before)))
        gap = "" if holder else explain_missing(report, key if speed else "speed")
        rows.append(
            TableRow(name, TableEntry(size(before), gap), TableEntry(size(after), gap), moved)
        )
    return rows


def _pair(holder: Document, target: str) -> tuple[Any, Any]:
    """Return the bytes that the report compares, (float, candidate), from {float_bytes,
    candidate_bytes} or {system: bytes}."""
    if "candidate_bytes" in holder or "float_bytes" in holder:
        return holder.get("float_bytes"), holder.get("candidate_bytes")
    first = baseline({"systems": holder}, target)
    return holder.get(first) if first else None, holder.get("candidate")
