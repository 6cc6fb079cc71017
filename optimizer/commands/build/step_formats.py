"""Write reports of a run for CI tools: Prometheus text, JUnit XML, Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

Report = Mapping[str, Any]
CONTROL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow."""


def prometheus(flat: Mapping[str, float]) -> str:
    """Write a run's metrics for a CI system: {"TARGET/METRIC": number} as Prometheus text 0.0.4:
    gauge `optimize`, two labels."""
    lines = ["# HELP optimize Measurements of a run of optimize.", "# TYPE optimize gauge"]
    for name, value in sorted(flat.items()):
        target, _, metric = name.partition("/")
        lines.append(f'optimize{{target="{_label(target)}",metric="{_label(metric)}"}} {value!r}')
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def junit(document: Mapping[str, Any]) -> str:
    """Write the gates of a run for a CI system as JUnit XML: a suite per target, a case per gate;
    fail and inconclusive are failures, a gate not measured is skipped; a run that ended early is
    one case with an error."""
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
    """Return a run's summary `text` in Markdown for a CI system: a heading, and a fence longer than
    any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    named = f"\n\nDigest of the bundle: `{digest}`" if digest else ""
    return f"## optimize: {verdict}{named}\n\n{fence}\n{text.strip()}\n{fence}\n"
