"""Read the recorded measurement of a bundle: the timed grid, and the ratio to float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bounds import ITERATIONS, NEW_TOKENS, check_grid
from ..errors import BundleError, InputError
from .manifest import read_reports


@dataclass(frozen=True)
class Grid:
    """Cells that `bench` times: every batch with every sequence, `iterations` rounds each."""

    batch: Sequence[int]
    sequence: Sequence[int]
    iterations: int


def bench_grid(
    manifest: dict[str, Any],
    batch: Sequence[int] | None,
    sequence: Sequence[int] | None,
    iterations: int | None,
) -> Grid:
    """Return the grid of shapes that `bench` times, that of the bundle's recipe with the given
    parts replaced.

    batch, sequence, iterations: replacements; None: as in the manifest's recipe

    Raises InputError for a part that is neither given nor recorded, or is too large.
    """
    latency = (manifest["recipe"].get("validate") or {}).get("latency") or {}
    chosen = {"batch": batch, "sequence": sequence, "iterations": iterations}
    merged: dict[str, Any] = {
        name: latency.get(name) if v is None else v for name, v in chosen.items()
    }
    for name, value in merged.items():
        if not value:
            raise InputError("not given, and the manifest records none", where=f"--{name}")
    grid = Grid(**merged)
    check_grid(max(grid.batch), max(grid.sequence))
    if grid.iterations > ITERATIONS:
        raise InputError(
            f"{grid.iterations:,} was given", where="--iterations", accepted=f"1 to {ITERATIONS:,}"
        )
    return grid


def choose_new_tokens(manifest: dict[str, Any], chosen: int | None) -> int:
    """Return the number of tokens that `bench` generates per prompt: `chosen`, else the recipe's.

    Raises InputError without either.
    """
    latency = (manifest["recipe"].get("validate") or {}).get("latency") or {}
    number = chosen or latency.get("new_tokens")
    if not number:
        raise InputError("not given, and the manifest records none", where="--new-tokens")
    if not 1 <= number <= NEW_TOKENS:
        raise InputError(
            f"{number:,} was given", where="--new-tokens", accepted=f"1 to {NEW_TOKENS:,}"
        )
    return int(number)


def recorded_speed(folder: Path, manifest: dict[str, Any], target: str) -> dict[str, Any]:
    """Read the candidate's times and its ratio to float from a bundle's report of a target.

    Returns {"machine", "threads", "cells": [{"batch", "sequence", "p50" in ms, "ratio"}]}, or
    {"missing": reason}. Cells of text-generation are {"batch", "prompt", "ratio"}.
    """
    try:
        reports = read_reports(folder, manifest)
    except BundleError as e:
        return {"missing": e.problem}
    report: dict[str, Any] = next((r for r in reports if r["target"] == target), {})
    speed = report.get("speed") or {}
    if not speed.get("cells"):
        why = (report.get("not_measured") or {}).get("speed")
        return {"missing": str(why or "the report has no times")}
    return {
        "machine": speed["machine"],
        "threads": speed["threads"],
        "cells": [_cell(cell) for cell in speed["cells"]],
    }


def _cell(cell: dict[str, Any]) -> dict[str, Any]:
    if "prompt" in cell:
        return {k: cell.get(k) for k in ("batch", "prompt", "ratio")}
    return {
        "batch": cell["batch"],
        "sequence": cell["sequence"],
        "p50": cell["systems"]["candidate"]["end_to_end"]["p50"],
        "ratio": cell.get("ratio"),
    }
