"""`optimize explain`: what a report.json says of its ledger, as facts; explain_text.py is the text.

    report    the file;  module: the one asked about, or null
    targets   [{target, verdict, dropped (left out of the bundle by on_fail),
                machine   {cpu, cores, torch_capability, threads}, or null where it is not recorded
                finding   {hop, kind, because: [sentence]} of the first hop that failed; hop null
                          and kind "fine" when none did
                hops      [{hop, from, ok, measured, limit, why, problems, unproven,
                            correct_runs  {runs, unit_roundoff, confidence, missed, outputs: {name:
                                          {median, limit, measured}}}: what correct runs differ by,
                                          where the limit was measured; else null
                            judged        how many pieces were
                            nearest       the piece nearest to its limit, or furthest beyond
                            finding       {kind, because}, null unless it failed}]
                modules   [{module, scheme, note, problems, hops: [{hop, pieces}]}]: of the module
                          asked about every hop; else of the failed hop those beyond their limits,
                          or the nearest when none is}]

The kind of a finding:
    fault     an integer is wrong where no tie is near, a product is beyond its derived bound, a law
              that allows no rounding is broken, or a part given torch's own inputs strays further
              than correct runs do
    rounding  every piece is within its limit; only the distance end to end is beyond
    unclear   the distance end to end is beyond, and no piece was judged alone
    budget    what quantization itself costs is beyond the recipe's budget
    unrun     the hop could not be carried out
Reads JSON and nothing else, so that a report can be explained on any machine.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import InputError
from optimizer.harness.trust.verify import parse
from optimizer.validate.ledger.breach import BUDGET, CORRECT_RUNS
from optimizer.validate.ledger.entry import statistic

Document = Mapping[str, Any]
COMMAND = "optimize explain "
SHOWN = 3  # modules of a failed hop, and names that come near
INPUT = ":input"  # what lies before a module is named after its input


def explain(path: Path, module: str | None) -> dict[str, Any]:
    """The facts. path: a report.json of one target, a bundle's of several, or a folder with one.

    Raises InputError for a file that is no report, and for a module that is not in it.
    """
    file, reports = read(path)
    if module is not None:
        _check_module(module, reports, file)
    return {
        "report": str(file),
        "module": module,
        "targets": [_target(report, module) for report in reports],
    }


def command(report: Document, path: Path) -> str:
    """The command that shows more of a ledger that failed: of the module that is furthest beyond
    its limit, where it is a module's fault. "" when every hop held."""
    failed = next((e for e in report["ledger"] if e["ok"] is False), None)
    if failed is None:
        return ""
    bad = [_base(p) for p in _beyond(failed)]
    known = _names([report])
    named = [n for p in failed["problems"] if (n := p.partition(": ")[0]) in known]
    module = next((n for n in (*bad, *named) if n in known), None)
    return COMMAND + shlex.join([str(path), *([module] if module else [])])


def read(path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The file and the reports in it. Raises InputError saying what was found instead."""
    file = path / "report.json" if path.is_dir() else path
    try:
        document = parse(file.read_bytes(), finite=False)
    except OSError as e:
        what = "a folder without report.json" if path.is_dir() else f"cannot be read ({e.strerror})"
        raise _refused(path, what) from None
    except ValueError:
        begins = file.read_bytes()[:24].decode(errors="replace")
        raise _refused(file, f"is no JSON: it begins {begins!r}") from None
    reports = document if isinstance(document, list) else [document]
    if not reports:
        raise _refused(file, "an empty list of reports")
    for report in reports:
        if not (isinstance(report, dict) and isinstance(report.get("ledger"), list)):
            raise _refused(file, f"{_described(report)}, which has no ledger")
    return file, reports


def _refused(path: Path, problem: str) -> InputError:
    return InputError(
        problem,
        where=str(path),
        accepted="the report.json of a validate step, a bundle or a failed run, or its folder",
    )


def _described(value: Any) -> str:
    if isinstance(value, dict):
        keys = ", ".join(list(value)[:4])
        return f"a JSON object of {keys or 'nothing'}{', ...' if len(value) > 4 else ''}"
    return f"JSON of type {type(value).__name__}"


def _check_module(module: str, reports: Sequence[Document], file: Path) -> None:
    names = sorted(_names(reports))
    if module in names:
        return
    closest = [n for n in names if module in n][:SHOWN]
    closest += [n for n in get_close_matches(module, names, SHOWN, 0.0) if n not in closest]
    raise InputError(
        f"no module {module!r} among its {len(names)}",
        where=str(file),
        fix=f"The closest are {', '.join(closest[:SHOWN])}." if closest else "",
    )


def _names(reports: Sequence[Document]) -> set[str]:
    """Every module that a piece or a row of the compress stage names."""
    pieces = {_base(p) for r in reports for e in r["ledger"] for p in e.get("pieces") or ()}
    return pieces | {str(row["module"]) for r in reports for row in r.get("modules") or ()}


def _base(piece: Document) -> str:
    """The module a piece belongs to."""
    return str(piece["module"]).partition(INPUT)[0]


def _number(value: Any) -> float:
    """As it was measured: JSON has null for what is not finite."""
    return inf if value is None else float(value)


def _beyond(entry: Document) -> list[Document]:
    """The pieces beyond their limits, the furthest first."""
    bad = [p for p in entry.get("pieces") or () if not _number(p["ratio"]) <= 1]
    return sorted(bad, key=lambda p: -_number(p["ratio"]))


def _target(report: Document, module: str | None) -> dict[str, Any]:
    entries = report["ledger"]
    hops = [_hop(e) for e in entries]
    failed = next((i for i, e in enumerate(entries) if e["ok"] is False), None)
    finding: dict[str, Any] = {"hop": None, "kind": "fine", "because": []}
    if failed is not None:
        finding = {"hop": hops[failed]["hop"], **hops[failed]["finding"]}
    if module is not None:
        shown = [module] if module in _names([report]) else []
        modules = [_module(name, report, entries) for name in shown]
    elif failed is not None:
        shown = _to_show(entries[failed])
        modules = [_module(name, report, [entries[failed]]) for name in shown]
    else:
        modules = []
    return {
        "target": report.get("target"),
        "verdict": report.get("verdict"),
        "dropped": bool(report.get("dropped")),
        "machine": report.get("machine"),
        "finding": finding,
        "hops": hops,
        "modules": modules,
    }


def _to_show(entry: Document) -> list[str]:
    """Modules of a failed hop: those beyond their limits, else the nearest."""
    pieces = _beyond(entry) or [p for p in [_nearest(entry)] if p is not None]
    return list(dict.fromkeys(_base(p) for p in pieces))[:SHOWN]


def _nearest(entry: Document) -> Document | None:
    return max(entry.get("pieces") or (), key=lambda p: _number(p["ratio"]), default=None)


def _hop(entry: Document) -> dict[str, Any]:
    measured = entry.get("measured") or {}
    return {
        "hop": entry["hop"],
        "from": entry.get("from", ""),
        "ok": entry["ok"],
        "measured": measured.get(statistic(entry["hop"])),
        "limit": entry.get("tolerance"),
        "why": entry.get("why", ""),
        "problems": list(entry.get("problems") or ()),
        "unproven": entry.get("unproven", ""),
        "correct_runs": entry.get("spread"),
        "judged": len(entry.get("pieces") or ()),
        "nearest": _nearest(entry),
        "finding": _finding(entry) if entry["ok"] is False else None,
    }


def _finding(entry: Document) -> dict[str, Any]:
    """See the module's docstring. because: the sentences that decide."""
    problems = [str(p) for p in entry.get("problems") or ()]
    if not entry.get("measured") and not entry.get("from"):
        return {"kind": "unrun", "because": problems}
    apart = [p for p in problems if p.endswith(CORRECT_RUNS)]
    budget = [p for p in problems if p.startswith(BUDGET)]
    faults = [p for p in problems if p not in (*apart, *budget)]
    if faults or not (apart or budget):
        return {"kind": "fault", "because": faults}
    if budget:
        return {"kind": "budget", "because": budget}
    return {"kind": "rounding" if entry.get("pieces") else "unclear", "because": apart}


def _module(name: str, report: Document, entries: Sequence[Document]) -> dict[str, Any]:
    row: Document = next((r for r in report.get("modules") or () if r["module"] == name), {})
    hops = [
        {"hop": e["hop"], "pieces": [p for p in e.get("pieces") or () if _base(p) == name]}
        for e in entries
    ]
    return {
        "module": name,
        "scheme": row.get("scheme"),
        "note": row.get("note", ""),
        "problems": [p for e in entries for p in e.get("problems") or () if name in p],
        "hops": [f for f in hops if f["pieces"]],
    }
