"""What a report promises and whether it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optimizer.foundation.verdicts import Verdict, worst
from optimizer.validate.ledger.breach import breach
from optimizer.validate.quality.significance import Decision

UNMEASURED = "not measured"  # declared, and not to be judged on this machine: never a pass


@dataclass(frozen=True)
class Gate:
    """verdict: pass, fail, inconclusive, or not measured. limit: what `measured` is held against;
    interval: of measured, an end None when unknown."""

    name: str
    verdict: str
    measured: float | None
    limit: float | None
    interval: tuple[float | None, float | None] | None
    message: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "measured": self.measured,
            "limit": self.limit,
            "interval": list(self.interval) if self.interval else None,
            "message": self.message,
        }


def from_decision(name: str, decision: Decision, what: str) -> Gate:
    """A paired test as a gate: the drop against the margin."""
    low, high = decision.interval
    bounds = f"between {low:.4f} and {high:.4f} at {decision.confidence:.0%} on each side"
    message = f"{what} drops by {decision.drop:.4f}, {bounds}, on {decision.examples} examples"
    message += lost(decision)
    if decision.verdict == "inconclusive":
        message += f"; {_what_would_decide(decision)}"
    return Gate(name, decision.verdict, decision.drop, decision.margin, decision.interval, message)


def _what_would_decide(decision: Decision) -> str:
    low, high = decision.interval
    if not decision.needed:
        return "the drop is so near the margin that no number of examples would decide"
    if high < decision.margin or low > decision.margin:
        return f"so few examples decide nothing, whatever they show: about {decision.needed} would"
    return f"about {decision.needed} examples would decide"


def add_advice(gate: Gate, advice: str) -> Gate:
    """Append what to do to the message of a gate that failed."""
    if gate.verdict != "fail":
        return gate
    return replace(gate, message=f"{gate.message}; {advice}")


def lost(decision: Decision) -> str:
    """What ends the message of a test that failed: the end of its interval beside the margin."""
    if decision.verdict != "fail":
        return ""
    least, allowed = breach(decision.interval[0], decision.margin)
    return f"; {least} at least, {allowed} is allowed"


def reached(decision: Decision) -> str:
    """The same of a share that the recipe gives a lower bound for, and the test what it lacks."""
    if decision.verdict != "fail":
        return ""
    most, least = breach(1 - decision.interval[0], 1 - decision.margin)
    return f"; {most} at most, {least} is asked"


def overall(gates: Sequence[Gate]) -> Verdict:
    """The worst verdict of the gates that could be judged. Raises OptimizeError when none could."""
    return worst(g.verdict for g in gates if g.verdict != UNMEASURED)
