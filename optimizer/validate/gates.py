"""Gates of a report: a measurement, its limit and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from optimizer.foundation.verdicts import Verdict, worst
from optimizer.validate.ledger.breach import write_breach
from optimizer.validate.quality.significance import Decision

UNMEASURED = "not measured"  # declared, and not to be judged on this machine: never a pass


@dataclass(frozen=True)
class Gate:
    """Verdict on one measurement of a target that is judged.

    name: name in the report, such as "quality.accuracy"
    verdict: pass, fail, inconclusive, or not measured
    measured: measured value; None where there is none
    limit: limit of `measured`; None where there is none
    interval: (lower, upper) end of the interval of `measured`; an unknown end is None
    message: sentence for the report
    """

    name: str
    verdict: str
    measured: float | None
    limit: float | None
    interval: tuple[float | None, float | None] | None
    message: str

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "interval": list(self.interval) if self.interval else None}


def make_gate(name: str, decision: Decision, what: str) -> Gate:
    """Make the gate that compares the drop of a metric with its margin.

    name: name of the gate
    decision: result of the paired test
    what: name of the metric in the message
    """
    low, high = decision.interval
    bounds = f"between {low:.4f} and {high:.4f} at {decision.confidence:.0%} on each side"
    message = f"{what} drops by {decision.drop:.4f}, {bounds}, on {decision.examples} examples"
    message += describe_excess(decision)
    if decision.verdict == "inconclusive":
        message += f"; {_deciding_text(decision)}"
    return Gate(name, decision.verdict, decision.drop, decision.margin, decision.interval, message)


def _deciding_text(decision: Decision) -> str:
    low, high = decision.interval
    if not decision.needed:
        return "the drop is so near the margin that no number of examples would decide"
    if high < decision.margin or low > decision.margin:
        return f"too few examples to decide: about {decision.needed} are needed"
    return f"about {decision.needed} examples would decide"


def add_advice(gate: Gate, advice: str) -> Gate:
    """Append `advice`, a sentence on what to do, to the message of a failed gate."""
    if gate.verdict != "fail":
        return gate
    return replace(gate, message=f"{gate.message}; {advice}")


def describe_excess(decision: Decision) -> str:
    """Describe by how much a failed test exceeds its margin, as the end of a message: the
    interval's lower end and the margin; "" where the test did not fail."""
    if decision.verdict != "fail":
        return ""
    least, allowed = write_breach(decision.interval[0], decision.margin)
    return f"; at least {least}, allowed {allowed}"


def describe_miss(decision: Decision) -> str:
    """Describe by how much a share that failed misses its lower bound, as the end of a message; ""
    where the test did not fail.

    decision: decision about 1 - share
    """
    if decision.verdict != "fail":
        return ""
    most, least = write_breach(1 - decision.interval[0], 1 - decision.margin)
    return f"; at most {most}, required {least}"


def judge_overall(gates: Sequence[Gate]) -> Verdict:
    """Return the worst verdict among the gates that could be judged. Raises OptimizeError where
    none could."""
    return worst(g.verdict for g in gates if g.verdict != UNMEASURED)
