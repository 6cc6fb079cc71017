"""Simulate searches whose truth is known, and count winners whose true drop misses the margin.

    python -m benchmarks.search.false_winners [--searches 200] [--out FILE]

A search has candidates with a time and a true drop. The faster half lies at the margin or up to
half of it beyond, where a lucky candidate is easily taken for a good one; the others are within the
margin. Right and wrong answers to the rows of the search and to the held-out rows are drawn; in
every second search the candidates fail on the same rows. The slowest is the recipe itself. Each
search is decided by the functions of optimizer/search/sequential.py and the exact paired test, as
`optimize search` does, and by two simpler rules:

    estimated   the fastest candidate whose drop on the search's rows is within the margin
    tested      the fastest candidate that passes the test at 95 % on the search's rows, with no
                other rows
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.foundation.verdicts import Verdict
from optimizer.harness.server.versions.paired_test import judge_exactly
from optimizer.search import sequential
from optimizer.search.sequential import Look
from optimizer.validate.quality.quality import wilson

MARGIN, ALPHA = 0.02, 0.05
ROWS = 800  # of each part
CANDIDATES = 24
Outcomes = Any  # int8 (rows,): 1 lost, -1 won, 0 alike


@dataclass(frozen=True)
class Candidate:
    """Candidate with its truth: time, true drop, and its outcomes on both parts of the rows."""

    time: float
    drop: float
    search: Outcomes
    held_out: Outcomes


def draw(generator: np.random.Generator, together: bool, rows: int = ROWS) -> list[Candidate]:
    """Draw the candidates of one search, the fastest first. together: they fail on the same rows"""
    candidates = []
    shared = generator.random((2, rows))
    for i in range(CANDIDATES):
        beyond = i < CANDIDATES // 2
        low, high = (MARGIN, 1.5 * MARGIN) if beyond else (0.0, 0.8 * MARGIN)
        drop = MARGIN if i == 0 else float(generator.uniform(low, high))
        won = float(generator.uniform(0, 0.02))
        own = shared if together else generator.random((2, rows))
        outcomes = [(u < drop + won).astype(np.int8) - (u > 1 - won) for u in own]
        candidates.append(Candidate(float(i), drop, *outcomes))
    return candidates


def verdict(outcomes: Outcomes, alpha: float) -> Verdict:
    """Judge outcomes by the exact paired test at level alpha."""
    lost, won = int((outcomes > 0).sum()), int((outcomes < 0).sum())
    return judge_exactly(lost, won, len(outcomes), MARGIN, alpha)


def winner(candidates: Sequence[Candidate]) -> Candidate | None:
    """Winner of a search as `optimize search` decides."""

    def judge(candidate: Candidate) -> Verdict:
        def look(at: Look) -> tuple[Verdict, Verdict]:
            decided = verdict(candidate.search[: at.rows], at.error)
            return decided, decided

        return sequential.screen(look, len(candidate.search), ALPHA)[1]

    kept = [candidate for candidate in candidates if judge(candidate) == "pass"]
    confirmed = sequential.confirm(
        kept, lambda f, a: (verdict(f.held_out, a), ""), ALPHA, lambda f: f is candidates[-1]
    )
    return confirmed[-1].candidate if confirmed and confirmed[-1].verdict == "pass" else None


def estimated(candidates: Sequence[Candidate]) -> Candidate | None:
    return next((f for f in candidates if f.search.mean() <= MARGIN), None)


def tested(candidates: Sequence[Candidate]) -> Candidate | None:
    return next((f for f in candidates if verdict(f.search, ALPHA) == "pass"), None)


RULES = {"search": winner, "tested": tested, "estimated": estimated}


def measure(searches: int, seed: int = 0) -> dict[str, Any]:
    """Simulate; return {rule: {"false", "interval", "found", "of"}}."""
    false, found = dict.fromkeys(RULES, 0), dict.fromkeys(RULES, 0)
    generator = np.random.default_rng(seed)
    for i in range(searches):
        candidates = draw(generator, together=i % 2 == 1)
        for name, rule in RULES.items():
            chosen = rule(candidates)
            found[name] += chosen is not None
            false[name] += chosen is not None and chosen.drop >= MARGIN
    return {
        name: {
            "false": false[name] / searches,
            "interval": wilson(false[name] / searches, searches, 0.95),
            "found": found[name] / searches,
            "of": searches,
        }
        for name in RULES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="False winners of simulated searches.")
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    measured = measure(options.searches)
    document = {
        "searches": options.searches,
        "candidates": CANDIDATES,
        "rows": ROWS,
        "margin": MARGIN,
        "rules": measured,
    }
    for name, rule in measured.items():
        low, high = rule["interval"]
        print(
            f"{name:<10} false winners {rule['false']:6.1%} ({low:.1%} to {high:.1%}), "
            f"a winner in {rule['found']:.0%}"
        )
    print(f"{options.searches} searches in {time.monotonic() - started:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
