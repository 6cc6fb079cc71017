"""A run's reports in the formats that pipeline tools know: metrics, JUnit XML, Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

Report = Mapping[str, Any]
CONTROL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold."""


def metrics(reports: Sequence[Report]) -> dict[str, float]:
    """{"<target>/<name>": number}, flat, of what was measured; what is not finite is left out."""
    flat: dict[str, Any] = {}
    for report in reports:
        target = report["target"]
        gates = [g["verdict"] for g in report.get("gates", [])]
        flat[f"{target}/passed"] = float(report.get("verdict") == "pass")
        flat[f"{target}/gates"] = len(gates)
        flat[f"{target}/gates_passed"] = gates.count("pass")
        sections = {"": report.get("quality"), **(report.get("also") or {})}
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


def prometheus(flat: Mapping[str, float]) -> str:
    """The metrics as text that Prometheus reads (exposition format 0.0.4), one name, two labels."""
    lines = ["# HELP optimize What a run of optimize measured.", "# TYPE optimize gauge"]
    for name, value in sorted(flat.items()):
        target, _, metric = name.partition("/")
        lines.append(f'optimize{{target="{_label(target)}",metric="{_label(metric)}"}} {value!r}')
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def junit(document: Mapping[str, Any]) -> str:
    """A suite per target and a test case per gate: fail and inconclusive are failures, what was not
    measured is skipped, and a run that ended early is one case with an error."""
    root = ElementTree.Element("testsuites", name="optimize")
    reports = document.get("reports", [])
    for report in reports:
        gates = report.get("gates", [])
        verdicts = [g["verdict"] for g in gates]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=_text(report["target"]),
            tests=str(len(gates)),
            failures=str(sum(v in ("fail", "inconclusive") for v in verdicts)),
            skipped=str(verdicts.count("not measured")),
            errors="0",
        )
        for gate in gates:
            _case(suite, report["target"], gate)
    if "error" in document:
        suite = ElementTree.SubElement(
            root, "testsuite", name="optimize", tests="1", failures="0", skipped="0", errors="1"
        )
        case = ElementTree.SubElement(suite, "testcase", classname="optimize", name="run")
        problem = _text(document.get("found", ""))
        error = ElementTree.SubElement(
            case, "error", type=_text(document.get("error", "")), message=problem
        )
        error.text = "\n".join(_text(document.get(k, "")) for k in ("where", "accepted", "fix"))
    return ElementTree.tostring(root, "unicode", xml_declaration=True)


def _case(suite: ElementTree.Element, target: str, gate: Report) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", classname=_text(target), name=_text(gate["name"])
    )
    message = _text(gate.get("message", ""))
    if gate["verdict"] in ("fail", "inconclusive"):
        failure = ElementTree.SubElement(case, "failure", type=gate["verdict"], message=message)
        failure.text = message
    elif gate["verdict"] == "not measured":
        ElementTree.SubElement(case, "skipped", message=message)


def _text(value: object) -> str:
    return CONTROL.sub("\ufffd", str(value))


def markdown(verdict: str, digest: str, text: str) -> str:
    """The run's last words under a heading. The fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    named = f"\n\nDigest of the bundle: `{digest}`" if digest else ""
    return f"## optimize: {verdict}{named}\n\n{fence}\n{text.strip()}\n{fence}\n"
