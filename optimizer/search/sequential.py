"""Sequential tests of a search, and their errors. alpha = 1 - confidence.

Screening. A candidate answers the rows of the search in LOOKS. Up to the look at share t of the
rows, the error that may have been spent is

    alpha(t) = alpha ln(1 + (e - 1) t)

the spending function of Lan and DeMets (1983, Biometrika 70, 659-663) that resembles the bounds of
Pocock (1977, Biometrika 64, 191-199). It spends early, because most candidates of a search are
hopeless. The error between two looks is the level of one exact or bootstrap test. So by the
union bound a candidate whose true drop is within the margin is stopped by that margin, at any look,
with probability at most alpha, however the looks depend on each other.

Confirmation. The best of many candidates on the search's rows is partly luck, so candidates are
judged again, best first, on rows that the search never read. Half of alpha is for the recipe
itself, at any place in the order, so that other candidates before it do not use it up. The k-th of
the others has the level

    alpha / (2 k (k + 1)),        alpha / 4 + alpha / 12 + ... = alpha / 2

The first that passes is the winner. By the union bound the winner's true drop is the margin or more
with probability at most alpha, for any number of candidates and any rule that ordered them, because
the order does not depend on those rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from optimizer.foundation.verdicts import Verdict

LOOKS = (0.25, 0.5, 1.0)
"""Shares of the search's rows after which a candidate may be stopped: a choice, since the bound
holds for any shares."""

T = TypeVar("T")


@dataclass(frozen=True)
class Look:
    """Interim test of a search's candidate after `rows` rows, with error probability `error`."""

    rows: int
    error: float


def spend_error(alpha: float, share: float) -> float:
    """Return the error probability that a candidate's interim tests may spend up to a share (0 to
    1) of the rows."""
    return alpha * math.log1p((math.e - 1) * share)


def plan_looks(rows: int, alpha: float) -> list[Look]:
    """Plan the interim tests of a candidate on `rows` rows; those at equal numbers of rows are
    merged."""
    planned: dict[int, float] = {}
    for share in LOOKS:
        planned[math.ceil(share * rows)] = spend_error(alpha, share)
    levels, before = [], 0.0
    for count, total in planned.items():
        levels.append(Look(count, total - before))
        before = total
    return levels


def screen(judge: Callable[[Look], tuple[Verdict, T]], rows: int, alpha: float) -> tuple[Look, T]:
    """Run a candidate's interim tests up to the first that fails; return the last look and the
    result of `judge` there."""
    for look in plan_looks(rows, alpha):
        verdict, result = judge(look)
        if verdict == "fail":
            break
    return look, result


def confirmation_error(alpha: float, attempt: int) -> float:
    """Return the level at which a search tests a candidate on held-out rows.

    attempt: k for the k-th candidate besides the recipe itself; 0 for the recipe itself
    """
    return alpha / 2 if attempt == 0 else alpha / (2 * attempt * (attempt + 1))


@dataclass(frozen=True)
class Confirmation(Generic[T]):
    """Result of judging a search's candidate on held-out rows at level `alpha`."""

    candidate: T
    verdict: Verdict
    why: str = ""
    alpha: float | None = None


def confirm(
    candidates: Iterable[T],
    judge: Callable[[T, float], tuple[Verdict, str]],
    alpha: float,
    is_recipe: Callable[[T], bool],
) -> list[Confirmation[T]]:
    """Judge a search's candidates, best first, until one passes; the last of the result is the
    winner if it passed.

    judge: (candidate, level) -> (verdict, reason)
    is_recipe: function that returns True for the recipe itself
    """
    judged: list[Confirmation[T]] = []
    others = 0
    for candidate in candidates:
        own = is_recipe(candidate)
        others += not own
        level = confirmation_error(alpha, 0 if own else others)
        verdict, why = judge(candidate, level)
        judged.append(Confirmation(candidate, verdict, why, level))
        if verdict == "pass":
            break
    return judged
