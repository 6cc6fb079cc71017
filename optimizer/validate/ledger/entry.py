"""What the ledger says of one hop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

from optimizer.validate.ledger.breach import CORRECT_RUNS, breach
from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.limits.spread import Spread, against
from optimizer.validate.ledger.pieces.pieces import Piece
from optimizer.validate.ledger.trace import Trace

LINE = 400  # characters of what could not be judged, in a message
MEASURED = "correct runs of this model, each float operation rounded at random, lie as far apart"


def statistic(hop: str) -> str:
    """Which number of a hop's distance its tolerance is held against: the budget of compress is of
    everything together, every other limit of the worst example."""
    return "relative_l2" if hop == "compress" else "worst_example"


@dataclass(frozen=True)
class Entry:
    """One hop. tolerance and measured.worst: the example that comes nearest to its limit, or lies
    furthest beyond. ok None: not run here. problems: what is wrong, worst first, with the
    checkpoint's names; empty when ok. unproven: what a hop that is ok could not judge, "". pieces:
    each part of a graph that was judged by itself. spread: how far correct runs lie apart, and the
    limits that follow (Spread.as_dict)."""

    hop: str
    start: str
    tolerance: float | None
    measured: Distance | None
    ok: bool | None
    why: str
    problems: tuple[str, ...] = ()
    unproven: str = ""
    pieces: tuple[Piece, ...] = ()
    spread: Mapping[str, Any] | None = None

    @property
    def reached(self) -> float | None:
        """The distance that is compared with `tolerance`."""
        return None if self.measured is None else self.measured.as_dict()[statistic(self.hop)]

    @property
    def partly(self) -> str:
        """`unproven` for a line of text; the whole of it is in the report."""
        return shorten(self.unproven, LINE, placeholder=" ...: see optimize explain")

    def not_judging(self, *unproven: str) -> Entry:
        """The same, which could not judge these either ("": nothing)."""
        return replace(self, unproven="; ".join(filter(None, (self.unproven, *unproven))))

    def as_dict(self) -> dict[str, Any]:
        return {
            "hop": self.hop,
            "from": self.start,
            "tolerance": self.tolerance,
            "measured": self.measured.as_dict() if self.measured else None,
            "ok": self.ok,
            "why": self.why,
            "problems": list(self.problems),
            "unproven": self.unproven,
            "pieces": [p.as_dict() for p in self.pieces],
            "spread": self.spread,
        }


@dataclass(frozen=True)
class Outputs:
    """What a hop answered, what it starts from answered, and how far correct runs lie apart."""

    results: Sequence[Mapping[str, Any]]
    expected: Sequence[Trace]
    spread: Spread


def within(
    hop: str,
    start: str,
    answers: Outputs,
    problems: Sequence[str],
    parts: Sequence[Piece] = (),
) -> Entry:
    """The entry of a hop whose outputs may differ as correct runs do, by no more; and no problem of
    another kind."""
    spread = answers.spread
    names = list(spread.limits)
    measured, worst, beyond = against(spread.limits, answers.results, answers.expected, names)
    name = max(names, key=lambda n: worst[n] / spread.limits[n])
    whole = [p.problem for p in sorted(parts, key=lambda p: -p.ratio) if not p.fine]
    whole += [
        f"{n}: an example is {shown[0]} from {start}, {shown[1]} {CORRECT_RUNS}"
        for n, far, limit in beyond
        for shown in [breach(far, limit)]
    ]
    return Entry(
        hop,
        start,
        spread.limits[name],
        replace(measured, worst=worst[name]),
        not problems and not whole,
        MEASURED,
        (*problems, *whole),
        pieces=tuple(parts),
        spread=spread.as_dict(worst),
    )
