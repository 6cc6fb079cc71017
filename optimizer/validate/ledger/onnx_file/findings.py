"""Name the first node of an ONNX file that matters, from the distances in a report (nodes.py).

    collect_facts(report, faults) -> {"from", "rows", "nodes", "not_compared",
                                      "first": {node, kind, why}}
    write_summary(facts), write_table(facts), write_node(facts, name) -> text of `optimize explain`

A node matters, in this order,
    fault    where the failed hop names its module, or a part between modules that it lies in
    budget   where its output is further from the file's than validate.quantization_budget
    largest  where its own error is the largest, if no other does; of errors that hardly differ
             other kernels may give another
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from optimizer.validate.ledger.breach import write_breach

Document = Mapping[str, Any]
BETWEEN = "between"  # the piece before a module, or before an output
LARGEST = 3  # nodes that the summary lists by their own error


@dataclass(frozen=True)
class Fault:
    """A sentence of a failed hop.

    place: module or output that it is about
    why: the sentence
    before: True where it is about the operators before that place
    """

    place: str
    why: str
    before: bool = False


def collect_facts(report: Document, faults: Sequence[Fault]) -> dict[str, Any] | None:
    """Return the report's distances by node, with the first node that matters; None where the
    report has no such distances."""
    nodes: Document | None = report.get("nodes")
    if not nodes or not nodes.get("nodes"):
        return None
    return {**nodes, "first": _first(nodes["nodes"], _budget(report), faults)}


def explain_none(report: Document) -> str:
    """Explain why a report has no distances by node; "" where it has some."""
    nodes: Document | None = report.get("nodes")
    if nodes is None:
        return "the model is not an ONNX file or a torch module, or its target does not read ONNX"
    if nodes.get("nodes"):
        return ""
    return str(nodes.get("why") or "the file and the lowered graph share no output of an operator")


def _budget(report: Document) -> float:
    limits = [e.get("tolerance") for e in report["ledger"] if e["hop"] == "compress"]
    return next((float(limit) for limit in limits if limit is not None), inf)


def _first(rows: Sequence[Document], budget: float, faults: Sequence[Fault]) -> dict[str, str]:
    """Choose the first node that matters: {"node": name, "kind": fault, budget or largest, "why":
    reason}.

    rows: distances of each node, in the order of the graph
    budget: the recipe's quantization budget; infinite without one
    """
    places = [(place, fault.why) for fault in faults if (place := _place(rows, fault)) is not None]
    if places:
        index, why = min(places)
        return {"node": rows[index]["node"], "kind": "fault", "why": why}
    for row in rows:
        if read_number(row["through"]) > budget:
            far, limit = write_breach(read_number(row["through"]), budget)
            why = f"its output is {far} from the file's; validate.quantization_budget is {limit}"
            return {"node": row["node"], "kind": "budget", "why": why}
    row = max(rows, key=lambda r: read_number(r["alone"]))
    return {"node": row["node"], "kind": "largest", "why": "its own error is the largest"}


def _place(rows: Sequence[Document], fault: Fault) -> int | None:
    """Return the index of the node that a fault is in; None where no node makes that place. For a
    fault before a module it is the float node with the largest error of its own, because float
    nodes should have almost none."""
    own = next((i for i, r in enumerate(rows) if fault.place in (r["module"], r["output"])), None)
    if own is None or not fault.before:
        return own
    alone = [0.0 if r["quantized"] else read_number(r["alone"]) for r in rows[: own + 1]]
    return alone.index(max(alone)) if any(alone) else own


def read_number(value: Any) -> float:
    """Convert a number of the report to a float. null is infinity: the report writes null for
    infinity and NaN, which JSON lacks."""
    return inf if value is None else float(value)


def write_summary(nodes: Document) -> list[str]:
    """Write sentences on a target: the number of compared nodes, the first that matters, the
    largest."""
    rows = nodes["nodes"]
    count = f"{len(rows)} of {len(rows) + len(nodes['not_compared'])} nodes"
    first = next(row for row in rows if row["node"] == nodes["first"]["node"])
    largest = sorted(rows, key=lambda row: -read_number(row["alone"]))[:LARGEST]
    listed = "; ".join(f"{_name(row)} {write_digits(row['alone'])}" for row in largest)
    matters = f"first that matters: {_name(first)}: {nodes['first']['why']}"
    if nodes["first"]["kind"] == "largest":
        matters = "no node is at fault or beyond validate.quantization_budget"
    return [
        f"{count} of the file compared, {nodes['rows']} rows, relative L2 from {nodes['from']}",
        matters,
        f"largest own errors of nodes: {listed}",
    ]


def write_table(nodes: Document) -> list[str]:
    """Write a line for each node: its own error, its error with those of the nodes before it, and
    its name."""
    lines = [f"{'alone':>9} {'through':>9}  node"]
    for row in nodes["nodes"]:
        alone, through = write_digits(row["alone"]), write_digits(row["through"])
        lines.append(f"{alone:>9} {through:>9}  {_name(row)}")
    names = ", ".join(map(repr, nodes["not_compared"]))
    return lines + ([f"not compared (made or joined otherwise): {names}"] if names else [])


def write_node(nodes: Document, name: str | None) -> list[str]:
    """Write a sentence on the node `name`; [] where no node has that name."""
    return [
        f"{_name(row)}, output {row['output']}: its own error {write_digits(row['alone'])}, with "
        f"those of the nodes before it {write_digits(row['through'])}"
        for row in nodes["nodes"]
        if row["node"] == name
    ]


def _name(row: Document) -> str:
    about = [row["operator"], *([row["module"]] if row["module"] else [])]
    return f"{row['node']!r} ({', '.join(about)}{'' if row['quantized'] else ', float'})"


def write_digits(value: Any) -> str:
    """Write a number of the report with two significant digits."""
    return f"{read_number(value):.2g}"
