"""Page of Markdown of encoder_int8.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.measure.results import CLOCKS, table, with_interval

HEADING = """\
# INT8 sentence encoders on a CPU

Made by `python -m benchmarks.encoders.int8 --with-openvino`. {of} relative to ONNX Runtime
float in the same run at sequence {sequence}: median over {rounds} rounds, [95 % interval]; lower is
faster. Cosine and probe accuracy on {examples} texts; the change is against float, in points, with
its interval. A row with "as above" runs the model of another row with other settings.
"""


def markdown(result: Mapping[str, Any]) -> str:
    """Format relative latency with quality, then milliseconds, then machine and versions."""
    systems = result["systems"]
    cells = list(dict.fromkeys(c for s in systems.values() for c in s["latency"]))
    heads = ["system", *cells, "cosine mean", "cosine min", "probe accuracy", "change"]
    ratios = [
        [s["title"], *([s["why"]] if s["why"] else [_ratio(s, c) for c in cells]), *_quality(s)]
        for s in systems.values()
    ]
    width = len(heads)
    of = CLOCKS[result.get("clock", "wall")]
    lines = [HEADING.format(**result, of=of), table(heads, [_filled(r, width) for r in ratios])]
    times = [[s["title"], *(_ms(s, c) for c in cells)] for s in systems.values() if not s["why"]]
    lines += ["\nMilliseconds, median of every call:\n", table(["system", *cells], times)]
    return "\n".join([*lines, "", _where(result), ""])


def _filled(row: list[str], width: int) -> list[str]:
    """Pad a row that has a reason instead of figures to `width` cells."""
    return row[:2] + ["–"] * (width - 2) if len(row) != width else row


def _ratio(system: Mapping[str, Any], cell: str) -> str:
    found = system["latency"].get(cell)
    return "–" if found is None else with_interval(found["ratio"])


def _ms(system: Mapping[str, Any], cell: str) -> str:
    found = system["latency"].get(cell)
    return "–" if found is None else f"{found['ms']['p50']:.1f}"


def _quality(system: Mapping[str, Any]) -> list[str]:
    found = system.get("quality")
    if system.get("reference") and found:
        return ["1", "1", f"{100 * found['candidate']['value']:.1f} %", "–"]
    if found is None:
        return ["as above" if system.get("quality_as") else "–"] * 4
    change, cosine = found["difference"], found["cosine"]
    value, low, high = (100 * b + 0.0 for b in (change["value"], *change["interval"]))
    return [
        f"{cosine['mean']:.4f}",
        f"{cosine['min']:.4f}",
        f"{100 * found['candidate']['value']:.1f} %",
        f"{value:+.1f} [{low:+.1f}, {high:+.1f}]",
    ]


def _where(result: Mapping[str, Any]) -> str:
    m = result["machine"]
    versions = {**m["packages"], **result["openvino"]}
    packages = ", ".join(f"{k} {v}" for k, v in versions.items())
    before, after = result["load_average"]
    return (
        f"Measured {result['when']} on {m['cpu']} ({', '.join(m['flags'])}), {m['cores']} cores, "
        f"{m['memory_mib'] / 1024:.0f} GiB, {m['os']}, Python {m['python']}; {packages}. "
        f"Load average before {before}, after {after}."
    )
