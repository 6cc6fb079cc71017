"""Flatten the figures of reports to {name: number}, for CI tools and registries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]


def list_metrics(reports: Sequence[Report]) -> dict[str, float]:
    """Return {"<target>/<name>": number} of every finite measurement in a run's reports."""
    flat: dict[str, Any] = {}
    for report in reports:
        target = report["target"]
        gates = [g["verdict"] for g in report.get("gates", [])]
        flat[f"{target}/passed"] = float(report.get("verdict") == "pass")
        flat[f"{target}/gates"] = len(gates)
        flat[f"{target}/gates_passed"] = gates.count("pass")
        adapters = {f"adapter/{n}": q for n, q in (report.get("adapters") or {}).items()}
        sections = {"": report.get("quality"), **(report.get("also") or {}), **adapters}
        for name, quality in sections.items():
            if quality:
                flat |= _quality(f"{target}/{name}{'/' if name else ''}", quality)
        speed = report.get("speed") or {}
        flat[f"{target}/size_bytes"] = (speed.get("size") or {}).get("candidate_bytes")
        for cell in speed.get("cells", []):
            flat |= _cell(target, cell)
    return {k: float(v) for k, v in flat.items() if _is_number(v)}


def _quality(at: str, quality: Report) -> dict[str, Any]:
    metric = quality["metric"]
    return {
        f"{at}{metric}": (quality.get("candidate") or {}).get("value"),
        f"{at}{metric}_float": (quality.get("baseline") or {}).get("value"),
        f"{at}{metric}_difference": (quality.get("difference") or {}).get("value"),
        f"{at}cosine": (quality.get("cosine") or {}).get("mean"),
    }


def _cell(target: str, cell: Report) -> dict[str, Any]:
    at = f"{target}/batch{cell['batch']}_{cell.get('sequence', cell.get('prompt'))}"
    times = ((cell.get("systems") or {}).get("candidate") or {}).get("end_to_end") or {}
    flat = {f"{at}/{name}_ms": times.get(name) for name in ("p50", "p99")}
    ratio = cell.get("ratio") or {}
    return {**flat, f"{at}/ratio_to_float": ratio.get("median")}


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(float(value))  # type: ignore[arg-type]
