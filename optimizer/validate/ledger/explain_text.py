"""The facts of explain.py as lines for a person."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from optimizer.validate.ledger.breach import breach

Document = Mapping[str, Any]
WIDTH = 100
VERDICTS = {
    "fine": "every hop that ran is within its limits",
    "fault": "a fault",
    "rounding": "rounding: every piece by itself is within its limit, and only the distance end to "
    "end is beyond what correct runs differ by",
    "unclear": "a fault or rounding: only the distance end to end is beyond what correct runs "
    "differ by, and no piece of this hop was judged alone",
    "budget": "no fault: quantization itself costs more than the recipe allows",
    "unrun": "the hop could not be carried out",
}
MEASURED = (
    "* measured in the run: correct runs of this model, every float operation rounded at random, "
    "were compared with each other; the limit is the upper tolerance bound of those distances"
)
SHARED = "its input is quantized once for several modules, and judged at the first of them"


def text(document: Document) -> str:
    """At most 100 columns wide, but for what the report itself words."""
    lines = [f"report   {document['report']}"]
    for target in document["targets"]:
        lines += ["", *_target(target)]
    return "\n".join(line.rstrip() for line in lines)


def _target(target: Document) -> list[str]:
    dropped = ", left out of the bundle" if target["dropped"] else ""
    lines = [
        f"target   {target['target']}: {str(target['verdict']).upper()}{dropped}",
        f"machine  {_machine(target['machine'])}",
        *_finding(target["finding"]),
        "",
    ]
    lines += [line for hop in target["hops"] for line in _hop(hop)]
    runs = [h["correct_runs"] for h in target["hops"] if h["correct_runs"]]
    if runs:
        lines += _wrapped(MEASURED + _confidence(runs), "  ")
    for module in target["modules"]:
        lines += ["", *_module(module)]
    return lines


def _machine(machine: Document | None) -> str:
    if machine is None:
        return "the report does not say"
    return (
        f"{machine['cpu']}, {machine['cores']} cores; torch with {machine['torch_capability']} "
        f"kernels on {_count(machine['threads'], 'thread')}"
    )


def _finding(finding: Document) -> list[str]:
    where = f", at hop {finding['hop']}" if finding["hop"] else ""
    lines = _wrapped(f"verdict  {VERDICTS[finding['kind']]}{where}", "")
    shown = finding["because"][:3]
    more = len(finding["because"]) - len(shown)
    lines += [line for reason in shown for line in _wrapped(f"- {reason}", "         ")]
    return lines + ([f"         and {more} more"] if more else [])


def _hop(hop: Document) -> list[str]:
    state = {True: "ok", False: "FAILED", None: "not run here"}[hop["ok"]]
    lines = _wrapped(f"{hop['hop']:<9}{state}{_distance(hop)}", "")
    nearest = hop["nearest"]
    if nearest:
        place = "nearest to its limit" if _infinite(nearest["ratio"]) <= 1 else "furthest beyond"
        judged = f"{_count(hop['judged'], 'piece')} judged alone; {place}: "
        lines += _wrapped(judged + f"{nearest['module']}, {_share(nearest)}", "         ")
    if hop["unproven"]:
        lines += _wrapped(f"in part only: {hop['unproven']}", "         ")
    return lines


def _distance(hop: Document) -> str:
    """What was measured against which limit, and how that came about."""
    if hop["ok"] is None or (hop["measured"] is None and hop["limit"] is None):
        return f": {hop['why']}"
    if hop["limit"] is None:
        return f": {_number(hop['measured'])} from {hop['from']}; {hop['why']}"
    measured, limit = breach(_infinite(hop["measured"]), _infinite(hop["limit"]))
    lines = f": {measured} from {hop['from']}, limit {limit}"
    runs = hop["correct_runs"]
    if not runs:
        return f"{lines}; {hop['why']}"
    spread = "; ".join(_output(name, o, len(runs["outputs"])) for name, o in _outputs(hop))
    return f"{lines}* ({_count(runs['runs'], 'correct run')}, {spread})"


def _outputs(hop: Document) -> list[tuple[str, Document]]:
    """Those beyond their limits, else the one that comes nearest."""
    outputs = hop["correct_runs"]["outputs"]
    far = sorted(
        outputs.items(),
        key=lambda o: -_infinite(o[1]["measured"]) / max(_infinite(o[1]["limit"]), 1e-300),
    )
    beyond = [o for o in far if not _infinite(o[1]["measured"]) <= _infinite(o[1]["limit"])]
    return beyond[:3] or far[:1]


def _output(name: str, output: Document, outputs: int) -> str:
    return f"{name if outputs > 1 else 'the median'} {_number(output['median'])} apart"


def _confidence(runs: Sequence[Document]) -> str:
    known = next((r for r in runs if "confidence" in r), None)
    if known is None:
        return "."
    return (
        f", passed by a correct candidate at one hop with a chance of {known['missed']:g} "
        f"({known['confidence']:.0%} confidence)."
    )


def _module(module: Document) -> list[str]:
    about = ", ".join(str(v) for v in (module["scheme"], module["note"]) if v)
    lines = [module["module"] + (f" ({about})" if about else "")]
    lines += [line for p in module["problems"] for line in _wrapped(f"- {p}", "  ")]
    for hop in module["hops"]:
        kinds = [p["piece"] for p in hop["pieces"]]
        for piece in hop["pieces"]:
            lines += _piece(hop["hop"], piece)
        if "arithmetic" in kinds and "quantizer" not in kinds:
            lines += _wrapped(f"{hop['hop']:<9}quantizer   {SHARED}", "  ")
    return lines if module["hops"] else [*lines, "  no piece of it was judged alone"]


def _piece(hop: str, piece: Document) -> list[str]:
    measured = f"{_share(piece)} ({piece['limit']})"
    if piece["piece"] == "quantizer":
        measured = f"{_integers(piece['counts'])} ({piece['limit']})"
    if piece["piece"] == "between":
        measured = f"what comes before it is at {measured}"
    lines = _wrapped(f"{hop:<9}{piece['piece']:<12}{measured}", "  ")
    return lines + [f"{'':<23}{_element(piece['piece'], e)}" for e in piece["worst"]]


def _integers(counts: Document) -> str:
    return (
        f"{counts['wrong']:,} of {counts['elements']:,} integers wrong where no tie is near; "
        f"{counts['flips']:,} of {counts['near_ties']:,} near a tie took the other one, by "
        f"rounding {counts['flips_allowed']:,} at most"
    )


def _element(piece: str, element: Document) -> str:
    at = f"token {element['token']}, channel {element['channel']}: "
    value, reference, bound = (_infinite(element[k]) for k in ("value", "reference", "bound"))
    if piece == "quantizer":
        return f"{at}{value:.0f} for {reference:.6g}, which rounding knows to {bound:.2g}"
    off, allowed = breach(abs(value - reference), bound)
    return f"{at}{value:.9g} for {reference:.9g}, {off} off, {allowed} allowed"


def _share(piece: Document) -> str:
    """How near a piece is to its limit, or how far beyond."""
    ratio = _infinite(piece["ratio"])
    return f"{breach(ratio, 1.0)[0]} {'of' if ratio <= 1 else 'times'} its limit"


def _infinite(value: Any) -> float:
    """JSON has null for what is not finite."""
    return math.inf if value is None else float(value)


def _number(value: Any) -> str:
    return f"{_infinite(value):.2g}"


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
