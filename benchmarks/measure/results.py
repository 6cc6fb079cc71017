"""Records and pages of results: the machine, the conditions of a run, Markdown tables, JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optimizer.harness.runtimes.machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CLOCKS = {"wall": "Time", "cpu": "Processor time"}  # in the heading of a page


def machine() -> dict[str, Any]:
    """Describe this machine without the runtimes installed on it."""
    return {k: v for k, v in describe_machine().to_json().items() if k != "runners"}


def cpu_flags() -> list[str]:
    """List the processor's vector extensions that decide INT8 speed."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    present = set(next((x for x in text.splitlines() if x.startswith("flags")), "").split())
    return sorted(present & {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "amx_bf16"})


def conditions(load_before: float, rounds: int, clock: str) -> dict[str, Any]:
    """Record date, machine and settings of a run that ends now.

    load_before: load average when the run began
    """
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine() | {"flags": cpu_flags()},
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "rounds": rounds,
        "clock": clock,
    }


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table whose columns after the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(r) + " |" for r in (heads, rule, *rows))


def with_interval(found: Mapping[str, Any]) -> str:
    """Format {"median", "interval"} as `0.61 [0.58, 0.64]`; `?` is an end that is not bounded."""
    low, high = ("?" if b is None else f"{b:.2f}" for b in found["interval"])
    return f"{found['median']:.2f} [{low}, {high}]"


def write(result: dict[str, Any], page: str, folder: Path, name: str) -> None:
    """Write the figures as name.json and the page that shows them as name.md."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    print(page)
