"""Rows of false_alarms.py as one JSON document and as a page of Markdown."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.ledger.false_alarm_cells import CALIBRATION, SEQUENCE, TEXTS, Cell
from benchmarks.measure.results import table

Row = Mapping[str, Any]
CONFIDENCE = 0.95
QUANTILES = (0.5, 0.9, 0.99, 1.0)
AXES = (
    "model",
    "method",
    "scheme",
    "range",
    "bias_correction",
    "dialect",
    "compress_aten",
    "compress_onednn",
    "compress_threads",
    "validate_aten",
    "validate_onednn",
    "validate_threads",
)
HEADING = """\
# Clean runs that the ledger refuses

Made by `python -m benchmarks.ledger.false_alarms`. Nothing is planted in these runs: every refusal
is a false alarm, or a fault of the product. Two real models and random ones of real widths
(heavy-tailed weights, outlier channels), a balanced sample of models × methods × schemes × ranges ×
seeds × dialects × processor personalities. {texts} ledger texts and {calibration} calibration texts
of up to {sequence} tokens; engines of TensorRT-RTX are not built, their lowered graphs run on the
CPU. Quality is not judged.
"""


def interval(events: int, runs: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Compute the exact interval of a proportion (Clopper & Pearson 1934, Biometrika 26)."""
    if runs == 0:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    low = 0.0 if events == 0 else _solved(lambda p: _at_least(events, runs, p) - tail)
    high = 1.0 if events == runs else _solved(lambda p: tail - _at_most(events, runs, p))
    return low, high


def _at_most(events: int, runs: int, p: float) -> float:
    return sum(math.comb(runs, k) * p**k * (1 - p) ** (runs - k) for k in range(events + 1))


def _at_least(events: int, runs: int, p: float) -> float:
    return 1 - _at_most(events - 1, runs, p)


def _solved(rising: Callable[[float], float]) -> float:
    """Find the zero of a rising function on [0, 1]."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


def quantile(values: Sequence[float], share: float) -> float:
    """Find the smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(rows: Sequence[Row], about: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize rows as one document. A cell with an unsupported recipe is listed, not counted.

    about: {machine, when, command, ...}
    """
    runs = [r for r in rows if not _unsupported(r)]
    refused = [r for r in runs if r["refused"]]
    kinds: dict[str, list[float]] = defaultdict(list)
    for row in runs:
        for kind, ratio, _ in row["ratios"]:
            kinds[kind].append(ratio)
    largest = max((_largest(r) for r in runs if r["ratios"]), default=None)
    return {
        **about,
        "runs": len(runs),
        "refused": len(refused),
        "rate": _rate(refused, runs),
        "largest_ratio": None if largest is None else _as_dict(largest),
        "largest_ratio_of_passed": [
            quantile([_largest(r)[0] for r in runs if r["ratios"] and not r["refused"]] or [0], q)
            for q in QUANTILES
        ],
        "seconds": [quantile([r["seconds"] for r in runs] or [0], q) for q in QUANTILES],
        "ratios": {
            kind: {"count": len(v), "quantiles": [quantile(v, q) for q in QUANTILES]}
            for kind, v in sorted(kinds.items())
        },
        "by": {axis: _by(axis, runs) for axis in AXES},
        "refusals": [_listed(r) for r in refused],
        "unsupported": [_listed(r) for r in rows if _unsupported(r)],
        "cells": [_short(r) for r in runs],
    }


def _unsupported(row: Row) -> bool:
    return bool(row["refused"]) and row["refused"]["kind"] == "unsupported"


def _rate(refused: Sequence[Row], runs: Sequence[Row]) -> list[float]:
    share = len(refused) / len(runs) if runs else 0.0
    return [share, *interval(len(refused), len(runs))]


def _by(axis: str, runs: Sequence[Row]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in runs:
        groups[str(row["cell"][axis])].append(row)
    return {
        value: {
            "runs": len(rows),
            "refused": len(refused),
            "rate": _rate(refused, rows),
            "largest_ratio": max((_largest(r)[0] for r in rows if r["ratios"]), default=None),
        }
        for value, rows in sorted(groups.items())
        for refused in [[r for r in rows if r["refused"]]]
    }


def _largest(row: Row) -> tuple[float, str, str, str]:
    """Find (ratio, kind, module, title of the cell) of the row's largest ratio to a limit."""
    kind, ratio, where = max(row["ratios"], key=lambda r: r[1])
    return ratio, kind, where, Cell(**row["cell"]).title


def _as_dict(found: tuple[float, str, str, str]) -> dict[str, Any]:
    return dict(zip(("ratio", "kind", "module", "cell"), found, strict=True))


def _listed(row: Row) -> dict[str, Any]:
    cell = Cell(**row["cell"])
    named = {"key": cell.key, "cell": cell.title, "personalities": cell.personalities}
    return {**named, **row["refused"]}


def _short(row: Row) -> dict[str, Any]:
    cell = Cell(**row["cell"])
    found = _as_dict(_largest(row)) if row["ratios"] else None
    if found is not None:
        del found["cell"]
    return {
        "key": cell.key,
        "cell": cell.title,
        "personalities": cell.personalities,
        "refused": bool(row["refused"]),
        "largest_ratio": found,
        "seconds": row["seconds"],
    }


def markdown(document: Mapping[str, Any]) -> str:
    """Write the document as a page."""
    share, low, high = (100 * p for p in document["rate"])
    heading = HEADING.format(texts=TEXTS, calibration=CALIBRATION, sequence=SEQUENCE)
    lines = [
        heading,
        f"**{document['refused']} of {document['runs']} runs refused: {share:.1f} % "
        f"({low:.1f} to {high:.1f}, exact 95 % interval).**",
        _largest_line(document),
        "",
        "## Measured / limit",
        "",
        "Below 1 is within the limit; the quantizer's counts integers beside ties.",
        "",
        table(
            ["hop: piece", "judged", "median", "90 %", "99 %", "largest"],
            [
                [kind, str(found["count"]), *(f"{q:.3g}" for q in found["quantiles"])]
                for kind, found in document["ratios"].items()
            ],
        ),
    ]
    for axis, values in document["by"].items():
        lines += ["", f"## By {axis.replace('_', ' ')}", "", _axis_table(axis, values)]
    lines += ["", "## Refused", "", *_refusals(document["refusals"])]
    if document["unsupported"]:
        lines += ["", "## Not run: the recipe cannot be done", ""]
        lines += _refusals(document["unsupported"])
    return "\n".join([*lines, "", _where(document), ""])


def _largest_line(document: Mapping[str, Any]) -> str:
    found = document["largest_ratio"]
    if found is None:
        return "Nothing was measured."
    passed = document["largest_ratio_of_passed"]
    return (
        f"Largest measured / limit: {found['ratio']:.3g} ({found['kind']}, {found['module']}; "
        f"{found['cell']}); of runs that passed {passed[-1]:.3g}, in half of them below "
        f"{passed[0]:.3g}."
    )


def _axis_table(axis: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for value, found in values.items():
        _, low, high = (100 * p for p in found["rate"])
        largest = found["largest_ratio"]
        rows.append(
            [
                value,
                f"{found['refused']} of {found['runs']}",
                f"{low:.1f} to {high:.1f} %",
                "–" if largest is None else f"{largest:.3g}",
            ]
        )
    return table([axis.replace("_", " "), "refused", "95 % interval", "largest ratio"], rows)


def _refusals(listed: Sequence[Mapping[str, Any]]) -> list[str]:
    if not listed:
        return ["None."]
    lines = []
    for row in listed:
        at = f"hop {row['hop']}" if row["hop"] else f"stage {row['stage']}"
        crashed = ", crash" if row["kind"] == "crash" else ""
        lines.append(f"- `{row['key']}` {row['cell']}; {row['personalities']}: {at}{crashed}")
        lines += [f"  - {' '.join(m.split())[:300]}" for m in row["messages"]]
    return lines


def _where(document: Mapping[str, Any]) -> str:
    m, seconds = document["machine"], document["seconds"]
    packages = ", ".join(f"{k} {v}" for k, v in m["packages"].items())
    return (
        f"`{document['command']}`, {document['when']}, on {m['cpu']} ({', '.join(m['flags'])}), "
        f"{m['cores']} cores, {m['memory_mib'] / 1024:.0f} GiB, {m['os']}; {packages}. "
        f"{seconds[0]:.0f} seconds a run in the median, {seconds[-1]:.0f} at most, "
        f"{document['jobs']} at a time. Personalities: ATEN_CPU_CAPABILITY/ONEDNN_MAX_CPU_ISA/"
        "threads, of compress → of validate. Code: " + document["code"] + "."
    )
