"""Record the result of one hop.

hop, outputs, problems, pieces -> LedgerEntry -> report.json, read by `optimize explain`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from pydantic import TypeAdapter

from optimizer.foundation import atomic
from optimizer.validate.ledger.breach import CORRECT_RUNS, write_breach
from optimizer.validate.ledger.distance import WHOLE, Distance
from optimizer.validate.ledger.limits.spread import Alone, Spread, compare_runs, judge_alone
from optimizer.validate.ledger.pieces.pieces import JudgedPiece
from optimizer.validate.ledger.trace import Trace

ALL, WORST = "all examples together", "worst example"
LINE = 400  # characters of `unproven` in a message
MEASURED = "correct runs of this model, each float operation rounded at random, lie this far apart"


def name_statistic(hop: str) -> str:
    """Return the key in Distance.as_dict of the number that a hop's tolerance limits: for
    `compress` the distance of all examples together, for every other hop that of the worst example.

    hop: name of the hop, also with an adapter's name behind it
    """
    return "relative_l2" if hop.partition(" ")[0] == "compress" else "worst_example"


def describe_examples(hop: str) -> str:
    """Describe the examples that `name_statistic` measures a hop over, for messages."""
    return ALL if hop == "compress" else WORST


def find_unlimited_example(entry: Mapping[str, Any]) -> float | None:
    """Return the distance of the worst example where it exceeds the limit of all examples together;
    else None.

    entry: result of LedgerEntry.as_dict
    """
    measured, limit = entry.get("measured") or {}, entry.get("tolerance")
    worst = measured.get("worst_example")
    if name_statistic(str(entry.get("hop"))) == "worst_example" or worst is None or limit is None:
        return None
    return float(worst) if worst > limit else None


@dataclass(frozen=True)
class LedgerEntry:
    """Result of one hop of the ledger. Of several outputs, tolerance and measured.worst are those
    of the output nearest to its limit, or furthest beyond."""

    hop: str
    start: str  # the model that the hop compares with
    tolerance: float | None
    measured: Distance | None
    ok: bool | None  # None where the hop did not run here
    why: str  # origin of the limit, or the reason for not running
    problems: tuple[str, ...] = ()  # sentences with the checkpoint's names, worst first
    unproven: str = ""  # parts that a hop which is ok could not judge
    pieces: tuple[JudgedPiece, ...] = ()  # the parts of a graph that were judged alone
    spread: Mapping[str, Any] | None = None  # distances of correct runs and their limits

    @property
    def reached(self) -> float | None:
        """Distance of the hop that is compared with its limit `tolerance`; None where nothing was
        measured."""
        return None if self.measured is None else self.measured.as_dict()[name_statistic(self.hop)]

    @property
    def partly(self) -> str:
        """The sentences on what the hop could not judge (`unproven`), shortened to one line;
        report.json has all of them."""
        return shorten(self.unproven, LINE, placeholder=" ...: see optimize explain")

    def with_unproven(self, *unproven: str) -> LedgerEntry:
        """Return a copy with more sentences on parts that could not be judged; "" adds none."""
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

    def write(self, file: Path) -> None:
        """Write all fields to `file` as JSON, from which `read` restores the entry."""
        atomic.write(file, json.dumps(FIELDS.dump_python(self)).encode())

    @staticmethod
    def read(file: Path) -> LedgerEntry:
        return FIELDS.validate_python(json.loads(file.read_text("utf-8")))


FIELDS = TypeAdapter(LedgerEntry)


@dataclass(frozen=True)
class HopOutputs:
    """Outputs of a hop of the ledger, the expected ones, and the limits of their distance."""

    results: Sequence[Mapping[str, Any]]  # the hop's own
    expected: Sequence[Trace]  # traces of the model that it compares with
    spread: Spread  # limits from correct runs


def make_entry(
    hop: str,
    start: str,
    answers: HopOutputs,
    problems: Sequence[str],
    parts: Sequence[JudgedPiece] = (),
) -> LedgerEntry:
    """Make the entry of a hop whose outputs may differ as far as correct runs do. It is ok where
    `problems` is empty and every output and piece is within its limit.

    hop: name of the hop
    start: description of the model that it compares with
    answers: outputs of the hop and of that model, and their limits
    problems: sentences on broken laws
    parts: pieces of a graph that were judged alone
    """
    spread = answers.spread
    names = list(spread.limits)
    measured, worst, beyond = compare_runs(spread.limits, answers.results, answers.expected, names)
    apart = [p.problem for p in sorted(parts, key=lambda p: -p.ratio) if not p.fine]
    alone: dict[str, Alone] = {}
    if not problems and not apart:
        alone = _judge_alone(answers, [n for n, _, _ in beyond])
        beyond = [row for row in beyond if row[0] not in alone]
        worst |= {n: of_name.others for n, of_name in alone.items()}
    name = max(names, key=lambda n: worst[n] / spread.limits[n])
    apart += [
        f"{n}: an example is {shown[0]} from {start}, {shown[1]} {CORRECT_RUNS}"
        for n, far, limit in beyond
        for shown in [write_breach(far, limit)]
    ]
    unlimited = [_unlimited(spread.limits, judged=bool(parts)), _unlimited_parts(parts)]
    return LedgerEntry(
        hop,
        start,
        spread.limits[name],
        replace(measured, worst=worst[name]),
        not problems and not apart,
        MEASURED,
        (*problems, *apart),
        unproven="; ".join(filter(None, (*unlimited, *map(_words_alone, alone.items())))),
        pieces=tuple(parts),
        spread=spread.as_dict(worst),
    )


def _judge_alone(answers: HopOutputs, names: Sequence[str]) -> dict[str, Alone]:
    """Judge each output of `names`, all beyond the limit of the sample, by correct runs of the
    examples that exceed it. Return {output: its examples} up to the first output that fails."""
    alone: dict[str, Alone] = {}
    for name in names:
        of_name = judge_alone(answers.spread, answers.results, answers.expected, name)
        if of_name is None:
            break
        alone[name] = of_name
    return alone


def _words_alone(item: tuple[str, Alone]) -> str:
    """Write a sentence on the examples of an output that were judged by correct runs of their own.

    item: (output, its examples)
    """
    name, alone = item
    far, limit = write_breach(alone.distance, alone.limit)
    several = "examples were" if alone.examples > 1 else "example was"
    return (
        f"{name}: {alone.examples} {several} judged by correct runs of that input alone, because "
        f"rounding moves it further than the others (up to {far}, "
        + (f"limit {limit})" if alone.limit < WHOLE else "where nothing limits it)")
    )


def _unlimited(limits: Mapping[str, float], judged: bool) -> str:
    """Name, in a sentence, the outputs with limits so wide that zeros would pass; "" for none.

    limits: {output: limit}
    judged: True where the hop has pieces, each of which is judged alone
    """
    names = [name for name, limit in limits.items() if limit >= WHOLE]
    rest = "only its pieces are judged" if judged else "nothing limits them"
    apart = "correct runs of this model differ by as much as the size of its answers"
    return f"{', '.join(names)} from end to end: {apart}, so {rest}" if names else ""


def _unlimited_parts(parts: Sequence[JudgedPiece]) -> str:
    """Name, in a sentence, the pieces with limits so wide that zeros would pass; "" for none."""
    names = [part.module for part in parts if part.accepts_zeros]
    apart = "correct runs differ by as much as the size of their results, so nothing limits them"
    return f"the operators before {', '.join(names)}: {apart}" if names else ""
