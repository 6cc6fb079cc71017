"""Time of the kernels of a profile that another tool recorded, by module.

    Nsight Systems   `nsys export --type sqlite` of a recording with --trace=cuda,nvtx
    torch            `torch.profiler.profile().export_chrome_trace(file)`
    ONNX Runtime     the file that a session with enable_profiling writes

A kernel belongs to the innermost range around its launch, on the launching thread, whose name has
the form of a module's: `encoder.layer.0` or, as TensorRT and ONNX Runtime name their layers,
`encoder.layer.0/MatMul`. A fused kernel belongs to the first module in its name. Without a range,
or without a record of its launch, it belongs to no module, "".
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from optimizer.foundation.errors import DataError
from optimizer.foundation.reading import reading
from optimizer.measure.ort_profile import module_of, node_of, select_kernels

SQLITE = b"SQLite format 3\0"
KERNELS, LAUNCHES, RANGES, STRINGS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
    "StringIds",
)
NESTED = (59, 60)  # NVTX_EVENTS.eventType of push/pop and of start/end ranges
CPU = "CPUExecutionProvider"
NAME = re.compile(r"\w+(\.\w+)*")
ACCEPTED = (
    "a database of `nsys export --type sqlite`, a trace of torch's export_chrome_trace, or a "
    "profile of ONNX Runtime"
)


@dataclass(frozen=True)
class ProfiledRange:
    """Named range of one thread in an imported profile, in the profile's unit of time."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class ProfiledLaunch:
    """Run of a kernel on a GPU, or of an operator on a processor, in the profile's unit of time.

    start: start of its launch
    duration: duration of the kernel itself
    """

    start: float
    duration: float


def read(file: Path) -> dict[str, Any]:
    """Read a profile of another tool and sum its kernels by module.

    Returns {source, ms, kernels, modules: [{module, ms, share, kernels}], the slowest first}.

    Raises DataError for a file that is not such a profile, or has no kernels.
    """
    with reading(file, accepted=ACCEPTED, error=DataError, own_faults=True):
        with file.open("rb") as opened:
            database = opened.read(len(SQLITE)) == SQLITE
        if database:
            return _document("Nsight Systems", _read_nsight(file), 1e6)
        content = json.loads(file.read_text("utf-8"))
    if isinstance(content, dict) and isinstance(content.get("traceEvents"), list):
        return _document("torch", _read_torch(content["traceEvents"]), 1e3)
    if isinstance(content, list):
        return _document("ONNX Runtime", _read_onnx_runtime(content), 1e3)
    raise DataError("it is not a profile", where=str(file), accepted=ACCEPTED)


Times = Mapping[str, Sequence[float]]
"""{module: duration of each of its kernels}."""


def _document(source: str, times: Times, per_ms: float) -> dict[str, Any]:
    """Build the document of an imported profile. per_ms: units of time in a millisecond"""
    sums = {module: sum(durations) / per_ms for module, durations in times.items()}
    whole = sum(sums.values())
    if not whole:
        raise DataError(
            f"the profile of {source} has no kernels",
            where="optimize import-profile",
            fix="Record some runs: nsys profile --trace=cuda,nvtx; torch.profiler with CPU or CUDA "
            "activities; ONNX Runtime with enable_profiling.",
        )
    ordered = sorted(sums, key=lambda module: (-sums[module], module))
    rows = [
        {"module": m, "ms": sums[m], "share": sums[m] / whole, "kernels": len(times[m])}
        for m in ordered
    ]
    return {
        "source": source,
        "ms": whole,
        "kernels": sum(map(len, times.values())),
        "modules": rows,
    }


def _read_nsight(file: Path) -> Times:
    """Return {module: durations of its kernels} in nanoseconds, from a SQLite export.

    Schema: "SQLite Schema Reference" of the Nsight Systems user guide; a globalTid holds the
    process above its lowest 24 bits.
    """
    with closing(sqlite3.connect(f"file:{quote(str(file.resolve()))}?mode=ro", uri=True)) as base:
        tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}
        if missing := [name for name in (KERNELS, LAUNCHES) if name not in tables]:
            raise DataError(
                f"it has no table {missing[0]}, so no kernel was recorded",
                where=str(file),
                fix="Record with nsys profile --trace=cuda,nvtx, and export again.",
            )
        launched = base.execute(
            f"SELECT r.globalTid, COALESCE(r.start, k.start), k.end - k.start FROM {KERNELS} k "
            f"LEFT JOIN {LAUNCHES} r ON r.correlationId = k.correlationId "
            "AND r.globalTid >> 24 = k.globalPid >> 24"
        )
        launches = defaultdict(list)
        for thread, start, duration in launched:
            launches[thread].append(ProfiledLaunch(start, duration))
        ranges = defaultdict(list)
        if {RANGES, STRINGS} <= tables:
            for thread, start, end, name in base.execute(
                f"SELECT n.globalTid, n.start, n.end, COALESCE(n.text, s.value) FROM {RANGES} n "
                f"LEFT JOIN {STRINGS} s ON s.id = n.textId "
                f"WHERE n.eventType IN {NESTED} AND n.end IS NOT NULL"
            ):
                ranges[thread].append(ProfiledRange(start, end, name or ""))
    return _sum_by_module(launches, ranges)


def _read_torch(events: Iterable[Any]) -> Times:
    """Return {module: durations} in microseconds, of kernels or, without any, of the outermost
    operators of each thread. Ranges are those of torch.profiler.record_function."""
    whole = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
    of_kind: dict[str, list[Any]] = defaultdict(list)
    for event in whole:
        of_kind[str(event.get("cat"))].append(event)
    ranges = defaultdict(list)
    for e in of_kind["user_annotation"]:
        ranges[e["tid"]].append(ProfiledRange(e["ts"], e["ts"] + e["dur"], e["name"]))
    launches = defaultdict(list)
    starts = {
        e["args"].get("correlation"): (e["tid"], e["ts"])
        for kind in ("cuda_runtime", "cuda_driver")
        for e in of_kind[kind]
    }
    for e in of_kind["kernel"]:
        thread, start = starts.get(e["args"].get("correlation"), (None, e["ts"]))
        launches[thread].append(ProfiledLaunch(start, e["dur"]))
    if not of_kind["kernel"]:
        ends: dict[Any, float] = {}
        for e in sorted(of_kind["cpu_op"], key=lambda e: (e["ts"], -e["dur"])):
            if e["ts"] >= ends.get(e["tid"], 0.0):
                ends[e["tid"]] = e["ts"] + e["dur"]
                launches[e["tid"]].append(ProfiledLaunch(e["ts"], e["dur"]))
    return _sum_by_module(launches, ranges)


def _read_onnx_runtime(events: Iterable[Any]) -> Times:
    """Return {module: durations of its kernels} in microseconds.

    Raises DataError for kernels of a GPU: their events end with the launch, not with the kernel.
    """
    times = defaultdict(list)
    for e in select_kernels(events):
        provider = e.get("args", {}).get("provider", "an unknown provider")
        if provider != CPU:
            raise DataError(
                f"kernels of {provider} are timed by their launches in a profile of ONNX Runtime",
                where=node_of(e),
                accepted=f"kernels of {CPU} alone",
                fix="Record with nsys profile --trace=cuda,nvtx, and export to SQLite.",
            )
        times[module_of(node_of(e))].append(e["dur"])
    return times


def _sum_by_module(
    launches: Mapping[Any, Sequence[ProfiledLaunch]], ranges: Mapping[Any, Sequence[ProfiledRange]]
) -> Times:
    """Return {module: durations of its kernels}; "" for kernels outside all modules' ranges.

    launches, ranges: {thread: its launches, or ranges, in any order}
    """
    times = defaultdict(list)
    for thread, of_thread in launches.items():
        later = sorted(ranges.get(thread, ()), key=lambda r: (-r.start, r.end))
        opened: list[ProfiledRange] = []
        for launch in sorted(of_thread, key=lambda one: one.start):
            while later and later[-1].start <= launch.start:
                opened.append(later.pop())
            opened = [r for r in opened if r.end > launch.start]
            names = (_module(r.name) for r in reversed(opened))
            times[next((n for n in names if n), "")].append(launch.duration)
    return times


def _module(name: str) -> str:
    """Return the module that a range of a profile is named after; "" for other names, such as
    aten::addmm."""
    module = module_of(name) or name
    return module if NAME.fullmatch(module) else ""


def format_document(document: Mapping[str, Any], limit: int = 30) -> str:
    """Format the times by module of an imported profile for a terminal. limit: rows"""
    rows = document["modules"]
    lines = [f"{document['kernels']} kernels of {document['source']}, {document['ms']:.3f} ms:"]
    lines += [
        f"  {one['share']:6.1%}  {one['ms']:10.3f} ms  {one['module'] or 'no module'}"
        for one in rows[:limit]
    ]
    if len(rows) > limit:
        lines.append(f"  and {len(rows) - limit} more: --json has all")
    if {one["module"] for one in rows} == {""}:
        lines.append(
            "No range around a launch has the name of a module; docs/measure.md has the code that "
            "names them."
        )
    return "\n".join(lines)
