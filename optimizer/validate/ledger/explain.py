"""Explain the ledger of a report.json, as facts and as text (`optimize explain`).

    explain(path, module) -> facts;  render_text(facts) -> text;  command(report) -> command line

    report    the file;  module: the requested one, also by its node, or null
    targets   [{target, verdict, dropped (left out of the bundle by on_fail),
                machine   {cpu, cores, torch_capability, threads}, or null where it is not recorded
                finding   {hop, kind, because: [sentence]} of the first hop that failed; hop null
                          and kind "fine" where none did
                hops      [{hop, from, ok, measured, limit, why, problems, unproven,
                            judged_over   examples that `measured` is of, in words
                            beyond        the worst example, where it is beyond the limit of all
                                          examples together; else null
                            correct_runs  {runs, unit_roundoff, confidence, missed, outputs: {name:
                                          {median, limit, measured}}} where the limit was measured
                                          in the run; else null
                            judged        number of pieces
                            nearest       the piece nearest to its limit, or furthest beyond
                            finding       {kind, because}, null unless it failed}]
                modules   [{module, scheme, note, problems, hops: [{hop, pieces}]}]: every hop of
                          the requested module; else modules of the failed hop beyond their limits,
                          or the nearest one
                nodes     of a model that is an ONNX file: {from, rows, nodes, not_compared} of
                          onnx_file/nodes.py, and first {node, kind, why}, the first node that
                          matters (onnx_file/findings.py); else null}]

Kinds of a finding:
    fault     an integer is wrong away from a tie, a product is beyond its derived bound, a law
              without rounding is broken, or a part on torch's own inputs is further off than
              correct runs
    rounding  every piece is within its limit, only the distance end to end is beyond
    unclear   the distance end to end is beyond, and no piece was judged alone
    budget    the cost of quantization itself exceeds the recipe's budget
    unrun     the hop could not be carried out

Reads JSON only, so that a report can be explained on any machine.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import InputError
from optimizer.harness.trust.verify import parse
from optimizer.validate.ledger.breach import BUDGET, CORRECT_RUNS, write_breach
from optimizer.validate.ledger.distance import WHOLE
from optimizer.validate.ledger.entry import (
    describe_examples,
    find_unlimited_example,
    name_statistic,
)
from optimizer.validate.ledger.onnx_file import findings
from optimizer.validate.ledger.onnx_file.findings import read_number, write_digits

Document = Mapping[str, Any]
COMMAND = "optimize explain "
WIDTH = 100
VERDICTS = {
    "fine": "every hop that ran is within its limits",
    "fault": "a fault",
    "rounding": "rounding: every piece alone is within its limit, and only the distance end to end "
    "is beyond the limit that correct runs set",
    "unclear": "a fault or rounding: only the distance end to end is beyond the limit that correct "
    "runs set, and no piece of this hop was judged alone",
    "budget": "no fault: quantization itself costs more than the recipe allows",
    "unrun": "the hop could not be carried out",
}
MEASURED = (
    "* measured in the run: correct runs of this model, every float operation rounded at random, "
    "were compared with each other; the limit is the upper tolerance bound of those distances"
)
SHARED = "its input is quantized once for several modules, and judged at the first"
SHOWN = 3  # modules of a failed hop, and similar names
INPUT = ":input"  # ends the name of the piece before a module


def explain(path: Path, module: str | None) -> dict[str, Any]:
    """Return the facts of a report, in the form listed at the top of this file.

    path: a report.json of one target, a bundle's of several targets, or a folder that holds one
    module: name in the checkpoint; None: modules of the failed hop

    Raises InputError for a file that is not a report, and for a module that is not in it.
    """
    file, reports = read(path)
    if module is not None:
        _check_module(module, reports, file)
    return {
        "report": str(file),
        "module": module,
        "targets": [_target(report, module) for report in reports],
    }


def write_command(report: Document, path: Path) -> str:
    """Write the command line that explains a failed ledger further: with the module furthest beyond
    its limit, where there is one. Return "" where every hop passed.

    report: content of report.json of one target
    path: path of the report
    """
    failed = next((e for e in report["ledger"] if e["ok"] is False), None)
    if failed is None:
        return ""
    bad = [_base(p) for p in _beyond(failed)]
    known = _names([report])
    named = [n for p in failed["problems"] if (n := p.partition(": ")[0]) in known]
    module = next((n for n in (*bad, *named) if n in known), None)
    return COMMAND + shlex.join([str(path), *([module] if module else [])])


def read(path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Read a report: (path of report.json, content of the report of each target).

    path: a report.json, or a folder that holds one

    Raises InputError for anything else.
    """
    file = path / "report.json" if path.is_dir() else path
    try:
        document = parse(file.read_bytes(), finite=False)
    except OSError as e:
        what = "a folder without report.json" if path.is_dir() else f"cannot be read ({e.strerror})"
        raise _refused(path, what) from None
    except ValueError:
        begins = file.read_bytes()[:24].decode(errors="replace")
        raise _refused(file, f"is not JSON: it begins {begins!r}") from None
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
    """Collect the names that `module` may be: modules with a judged piece or with a row of stage
    compress, and nodes of an ONNX file."""
    pieces = {_base(p) for r in reports for e in r["ledger"] for p in e.get("pieces") or ()}
    nodes = {str(row["node"]) for r in reports for row in _nodes(r)}
    return pieces | nodes | {str(row["module"]) for r in reports for row in r.get("modules") or ()}


def _nodes(report: Document) -> Sequence[Document]:
    """Distances of each node of a model that is an ONNX file; empty for another model."""
    return (report.get("nodes") or {}).get("nodes") or ()


def _module_of(name: str, report: Document) -> str:
    """Return the module that the node `name` computes, "" where it computes none; `name` itself
    where it is not a node."""
    return next((str(r["module"]) for r in _nodes(report) if r["node"] == name), name)


def _faults(entry: Document) -> list[findings.Fault]:
    """Return the problems of a failed hop, each with the module or output that it is about."""
    pieces = [
        findings.Fault(_base(p), _piece_sentence(p), p["piece"] == findings.BETWEEN)
        for p in _beyond(entry)
    ]
    parts = [str(p).partition(": ") for p in entry.get("problems") or ()]
    laws = [
        findings.Fault(name.removesuffix(".weight").removesuffix(".bias"), f"{name}: {words}")
        for name, _, words in parts
        if not words.endswith(CORRECT_RUNS)
    ]
    return pieces + laws


def _piece_sentence(piece: Document) -> str:
    return f"{piece['module']}, {piece['piece']}: {_share(piece)}"


def _base(piece: Document) -> str:
    """Return the module of a piece: its name without the suffix ":input..." of its quantizers."""
    return str(piece["module"]).partition(INPUT)[0]


def _beyond(entry: Document) -> list[Document]:
    """Return the pieces of a hop whose distance exceeds their limit, the worst first."""
    bad = [p for p in entry.get("pieces") or () if not read_number(p["ratio"]) <= 1]
    return sorted(bad, key=lambda p: -read_number(p["ratio"]))


def _target(report: Document, module: str | None) -> dict[str, Any]:
    entries = report["ledger"]
    hops = [_hop(e) for e in entries]
    failed = next((i for i, e in enumerate(entries) if e["ok"] is False), None)
    finding: dict[str, Any] = {"hop": None, "kind": "fine", "because": []}
    if failed is not None:
        finding = {"hop": hops[failed]["hop"], **hops[failed]["finding"]}
    if module is not None:
        shown = [n for n in [_module_of(module, report)] if n and module in _names([report])]
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
        "nodes": findings.collect_facts(report, [] if failed is None else _faults(entries[failed])),
        "without_nodes": findings.explain_none(report),
    }


def _to_show(entry: Document) -> list[str]:
    """Choose up to SHOWN modules of a failed hop for `optimize explain`: those beyond their limits,
    else those nearest to their limits."""
    pieces = _beyond(entry) or [p for p in [_nearest(entry)] if p is not None]
    return list(dict.fromkeys(_base(p) for p in pieces))[:SHOWN]


def _nearest(entry: Document) -> Document | None:
    return max(entry.get("pieces") or (), key=lambda p: read_number(p["ratio"]), default=None)


def _hop(entry: Document) -> dict[str, Any]:
    measured = entry.get("measured") or {}
    return {
        "hop": entry["hop"],
        "from": entry.get("from", ""),
        "ok": entry["ok"],
        "measured": measured.get(name_statistic(entry["hop"])),
        "judged_over": describe_examples(entry["hop"]),
        "beyond": find_unlimited_example(entry),
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
    """Return {kind, because} of a failed hop: the kind as listed at the top of this file, and the
    sentences of the report that decide it."""
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


def render_text(document: Document, nodes: bool = False) -> str:
    """Write the text of `optimize explain` from the ledger's facts. Lines are at most 100 columns
    wide, except sentences of the report itself.

    document: result of `explain`
    nodes: True for a line per node of an ONNX file
    """
    lines = [f"report   {document['report']}"]
    for target in document["targets"]:
        lines += ["", *_target_lines(target)]
        if target["nodes"]:
            of_node = findings.write_node(target["nodes"], document["module"])
            lines += [line for sentence in of_node for line in _wrapped(sentence, "")]
            lines += ["", *findings.write_table(target["nodes"])] if nodes else []
        elif nodes:
            lines += ["", *_wrapped(f"by node  nothing compared: {target['without_nodes']}", "")]
    return "\n".join(line.rstrip() for line in lines)


def _target_lines(target: Document) -> list[str]:
    dropped = ", left out of the bundle" if target["dropped"] else ""
    lines = [
        f"target   {target['target']}: {str(target['verdict']).upper()}{dropped}",
        f"machine  {_machine_line(target['machine'])}",
        *_finding_lines(target["finding"]),
        "",
    ]
    lines += [line for hop in target["hops"] for line in _hop_lines(hop)]
    runs = [h["correct_runs"] for h in target["hops"] if h["correct_runs"]]
    if runs:
        lines += _wrapped(MEASURED + _confidence(runs), "  ")
    if target["nodes"]:
        lines += ["", "by node"]
        lines += [x for s in findings.write_summary(target["nodes"]) for x in _wrapped(s, "  ")]
    for module in target["modules"]:
        lines += ["", *_module_lines(module)]
    return lines


def _machine_line(machine: Document | None) -> str:
    if machine is None:
        return "not recorded in the report"
    return (
        f"{machine['cpu']}, {machine['cores']} cores; torch with {machine['torch_capability']} "
        f"kernels on {_count(machine['threads'], 'thread')}"
    )


def _finding_lines(finding: Document) -> list[str]:
    where = f", at hop {finding['hop']}" if finding["hop"] else ""
    lines = _wrapped(f"verdict  {VERDICTS[finding['kind']]}{where}", "")
    shown = finding["because"][:3]
    more = len(finding["because"]) - len(shown)
    lines += [line for reason in shown for line in _wrapped(f"- {reason}", "         ")]
    return lines + ([f"         and {more} more"] if more else [])


def _hop_lines(hop: Document) -> list[str]:
    state = {True: "ok", False: "FAILED", None: "not run here"}[hop["ok"]]
    lines = _wrapped(f"{hop['hop']:<8} {state}{_distance(hop)}", "")
    nearest = hop["nearest"]
    if nearest:
        place = "nearest to its limit" if read_number(nearest["ratio"]) <= 1 else "furthest beyond"
        judged = f"{_count(hop['judged'], 'piece')} judged alone; {place}: "
        lines += _wrapped(judged + f"{nearest['module']}, {_share(nearest)}", "         ")
    if hop["beyond"] is not None:
        far = write_digits(hop["beyond"])
        lines += _wrapped(f"the worst example is {far}, which has no limit of its own", "         ")
    if hop["unproven"]:
        lines += _wrapped(f"in part only: {hop['unproven']}", "         ")
    return lines


def _distance(hop: Document) -> str:
    """Write the end of a hop's first line: the distance, its limit, and the origin of both."""
    if hop["ok"] is None or (hop["measured"] is None and hop["limit"] is None):
        return f": {hop['why']}"
    if hop["limit"] is None:
        measured = write_digits(hop["measured"])
        return f": {hop['judged_over']} {measured} from {hop['from']}; {hop['why']}"
    measured, limit = write_breach(read_number(hop["measured"]), read_number(hop["limit"]))
    bound = f"limit {limit}"
    if read_number(hop["limit"]) >= WHOLE:
        apart = f"{read_number(hop['limit']):.3g}"
        bound = f"no limit: correct runs lie up to {apart} apart, an answer of zeros only 1"
    lines = f": {hop['judged_over']} {measured} from {hop['from']}, {bound}"
    runs = hop["correct_runs"]
    if not runs:
        return f"{lines}; {hop['why']}"
    spread = "; ".join(
        _output_median(name, o, len(runs["outputs"])) for name, o in _shown_outputs(hop)
    )
    return f"{lines}* ({_count(runs['runs'], 'correct run')}, {spread})"


def _shown_outputs(hop: Document) -> list[tuple[str, Document]]:
    """Return (name, numbers) of up to 3 outputs beyond their limits; where none is, of the one
    nearest to its limit."""
    outputs = hop["correct_runs"]["outputs"]
    far = sorted(
        outputs.items(),
        key=lambda o: -read_number(o[1]["measured"]) / max(read_number(o[1]["limit"]), 1e-300),
    )
    beyond = [o for o in far if not read_number(o[1]["measured"]) <= read_number(o[1]["limit"])]
    return beyond[:3] or far[:1]


def _output_median(name: str, output: Document, outputs: int) -> str:
    return f"{name if outputs > 1 else 'the median'} {write_digits(output['median'])} apart"


def _confidence(runs: Sequence[Document]) -> str:
    recorded = next((r for r in runs if "confidence" in r), None)
    if recorded is None:
        return "."
    return (
        f", exceeded by a correct candidate at one hop with probability {recorded['missed']:g} "
        f"({recorded['confidence']:.0%} confidence)."
    )


def _module_lines(module: Document) -> list[str]:
    about = ", ".join(str(v) for v in (module["scheme"], module["note"]) if v)
    lines = [module["module"] + (f" ({about})" if about else "")]
    lines += [line for p in module["problems"] for line in _wrapped(f"- {p}", "  ")]
    for hop in module["hops"]:
        kinds = [p["piece"] for p in hop["pieces"]]
        for piece in hop["pieces"]:
            lines += _piece_lines(hop["hop"], piece)
        if "arithmetic" in kinds and "quantizer" not in kinds:
            lines += _wrapped(f"{hop['hop']:<9}quantizer   {SHARED}", "  ")
    return lines if module["hops"] else [*lines, "  no piece of it was judged alone"]


def _piece_lines(hop: str, piece: Document) -> list[str]:
    measured = f"{_share(piece)} ({piece['limit']})"
    if piece["piece"] == "quantizer":
        measured = f"{_integer_counts(piece['counts'])} ({piece['limit']})"
    if piece["piece"] == "between":
        measured = f"the part before it is at {measured}"
    lines = _wrapped(f"{hop:<9}{piece['piece']:<12}{measured}", "  ")
    return lines + [f"{'':<23}{_element(piece['piece'], e)}" for e in piece["worst"]]


def _integer_counts(counts: Document) -> str:
    return (
        f"{counts['wrong']:,} of {counts['elements']:,} integers wrong away from a tie; "
        f"{counts['flips']:,} of {counts['near_ties']:,} near a tie took the other one, "
        f"of which rounding explains at most {counts['flips_allowed']:,}"
    )


def _element(piece: str, element: Document) -> str:
    at = f"token {element['token']}, channel {element['channel']}: "
    value, reference, bound = (read_number(element[k]) for k in ("value", "reference", "bound"))
    if piece == "quantizer":
        return f"{at}{value:.0f} for {reference:.6g}, known to {bound:.2g} by rounding"
    off, allowed = write_breach(abs(value - reference), bound)
    return f"{at}{value:.9g} for {reference:.9g}, {off} off, {allowed} allowed"


def _share(piece: Document) -> str:
    """Write the distance of a piece as a share of its limit, such as "40 % of its limit", or as a
    multiple of it."""
    ratio = read_number(piece["ratio"])
    return f"{write_breach(ratio, 1.0)[0]} {'of' if ratio <= 1 else 'times'} its limit"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(
        line,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
