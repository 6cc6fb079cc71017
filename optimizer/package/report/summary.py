"""Summary of a run for a terminal: verdicts, and a comparison of float and quantized."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from optimizer.package.report.cards.vectors import describe_forms
from optimizer.package.report.comparison import (
    Document,
    TableEntry,
    get_parts,
    list_warnings,
    name_candidate,
    paired_note,
    sort_gates,
)
from optimizer.package.report.rows import build_rows
from optimizer.package.report.verdict import counts
from optimizer.validate.ledger.explain import COMMAND

WIDTH = 100
COLUMNS = (22, 22, 22, 28)  # name, float, quantized, change; with gaps of 1 this fits WIDTH


def summarize(document: Mapping[str, Any]) -> str:
    """Summarize a run's report for the terminal, in one block per target: verdict, gates that did
    not pass, and a table of quality with interval, p50 and p99 end to end, and size. The first line
    lists dropped targets with reasons. At most 100 columns wide, except that line and commands to
    copy."""
    lines = [_first(document)]
    for report in get_parts(document, "reports"):
        lines += ["", *_target(report, name_candidate(document.get("recipe")))]
    if len(lines) == 1:
        lines.append("no target was judged")
    return "\n".join(line.rstrip() for line in lines)


def _first(document: Mapping[str, Any]) -> str:
    name, dropped = str(document.get("name", "unnamed")), get_parts(document, "dropped")
    if not dropped:
        return name
    without = "; ".join(f"{d['target']} ({d['gate']}: {d['message']})" for d in dropped)
    done = "the bundle was made" if document.get("manifest") else "judged"
    return f"{name}: {done} without {without}"


def _target(report: Document, name: str) -> list[str]:
    """Return the text, in a report's summary, on one target: verdict, gates that did not pass,
    warnings, and the table."""
    verdict = str(report.get("verdict")).upper() + (", DROPPED" if report.get("dropped") else "")
    heading = f"{report.get('target')}: {verdict}, {counts(report)}"
    lines = _wrapped(heading, "")
    for gate in sort_gates(report):
        if gate.get("verdict") != "pass":
            text = f"{gate.get('verdict')}: {gate.get('name')}: {gate.get('message', '')}"
            reason, command, rest = text.partition(COMMAND)
            lines += _wrapped(reason, "  ")
            lines += [f"    {command}{rest}"] if command else []
    for sentence in list_warnings(report):
        lines += _wrapped(f"warning: {sentence}", "  ")
    lines.append(_line("", "float", name, "change"))
    for row in build_rows(report):
        entries = [row.before, row.after, row.change]
        if row.unmeasured:
            lines += _wrapped(f"{row.name}: {row.before.text}: {row.before.note}", "")
            continue
        lines.append(_line(row.name, *(e.text for e in entries)))
        if any(e.note for e in entries):
            lines.append(_line("", *(_note(e) for e in entries)))
    return lines + _wrapped(describe_forms(report), "") + _wrapped(paired_note(report), "")


def _note(entry: TableEntry) -> str:
    return f"({entry.note})" if entry.note else ""


def _line(name: str, *entries: str) -> str:
    first, *rest = COLUMNS
    above = f"{name}\n{'':<{first}}" if len(name) > first else f"{name:<{first}}"
    return above + "".join(f" {c:>{w}}" for c, w in zip(entries, rest, strict=True))


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=indent, subsequent_indent=indent + "  "
    )
