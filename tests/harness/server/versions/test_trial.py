"""A trial errs as seldom as it promises however often it looks, and decides when it can."""

import math
from functools import cache

import numpy as np
import pytest

from optimizer.harness.server.versions import trial as trials
from optimizer.harness.server.versions.paired_test import Verdict, judge_exactly
from optimizer.harness.server.versions.trial import (
    FIRST,
    Terms,
    VersionTrial,
    allowed_error,
    answers_differ,
)
from optimizer.validate.quality.significance import decide_by_counts

MARGIN, CONFIDENCE = 0.05, 0.9


@cache
def limits(examples: int, margin: float, alpha: float) -> tuple[int, int]:
    """(the most examples that may differ in a pass, or -1; the fewest that do in a fail)."""

    def verdict(differing: int) -> Verdict:
        return judge_exactly(differing, 0, examples, margin, alpha)

    expected = min(examples, math.ceil(examples * margin))
    low, high = -1, expected  # the last that passes lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if verdict(middle) == "pass" else (low, middle)
    below, above = expected, examples + 1  # the first that fails lies in (below, above]
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if verdict(middle) == "fail" else (middle, above)
    return low, above


def distribution_after(looks: int, rate: float) -> dict[str, float]:
    """The chance of each verdict, computed exactly: the distribution of how many differ is carried
    from look to look, without what was decided."""
    left, at, chances = np.array([1.0]), 0, {"pass": 0.0, "fail": 0.0}
    for k in range(looks):
        examples = FIRST << k
        new = examples - at
        logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, new + 1)))])
        n = np.arange(new + 1)
        some = np.exp(
            logs[new] - logs - logs[::-1] + n * np.log(rate) + (new - n) * np.log1p(-rate)
        )
        left, at = np.convolve(left, some), examples
        passes, fails = limits(examples, MARGIN, allowed_error(k + 1, CONFIDENCE))
        chances["pass"] += left[: passes + 1].sum()
        chances["fail"] += left[fails:].sum()
        left[: passes + 1] = 0
        left[fails:] = 0
    return chances


def test_at_the_margin_all_looks_together_err_in_at_most_alpha() -> None:
    chances = distribution_after(6, MARGIN)
    assert max(chances.values()) <= 1 - CONFIDENCE
    assert min(chances.values()) > 0


def test_a_version_well_within_the_margin_passes_and_one_beyond_it_fails() -> None:
    assert distribution_after(6, MARGIN / 5)["pass"] > 0.95
    assert distribution_after(6, MARGIN * 3)["fail"] > 0.95


@pytest.mark.parametrize("examples", [32, 256])
def test_the_limits_are_those_of_the_gates_test(examples: int) -> None:
    passes, fails = limits(examples, MARGIN, 1 - CONFIDENCE)
    verdicts = [
        decide_by_counts(n, 0, examples, MARGIN, CONFIDENCE).verdict for n in range(examples // 2)
    ]
    assert [n for n, v in enumerate(verdicts) if v == "pass"] == list(range(passes + 1))
    assert verdicts.index("fail") == fails


def test_it_looks_after_each_doubling_alone_and_ends_with_its_verdict() -> None:
    trial = VersionTrial(Terms(0.2, 0.9, 1.0))
    verdicts = []
    for _ in range(200):
        trial.add(False)
        verdicts.append(trial.verdict)
    first = verdicts.index("pass")
    assert (first + 1) % FIRST == 0
    assert trial.over
    assert trial.examples == first + 1
    trial.add(True)
    assert trial.differing == 0


def test_a_trial_that_cannot_decide_ends_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MOST", 4 * FIRST)
    trial = VersionTrial(Terms(0.5, 0.999, 1.0))
    for i in range(4 * FIRST):
        trial.add(i % 2 == 0)
    assert trial.over
    assert trial.verdict == "inconclusive"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"label": "a", "score": 0.9}, {"label": "a", "score": 0.8}, False),
        ({"label": "a", "score": 0.9}, {"label": "b", "score": 0.9}, True),
        ({"embedding": [1.0, 0.0]}, {"embedding": [2.0, 0.001]}, False),
        ({"embedding": [1.0, 0.0]}, {"embedding": [1.0, 1.0]}, True),
        ({"embedding": [1.0, 0.0]}, {"embedding": [1.0, 0.0, 0.0]}, True),
        ({"embedding": [1.0]}, {"label": "a"}, True),
        ({"embedding": [1.0]}, {"embedding": [1.0], "label": "a"}, True),
        ({"tokens": ["x"]}, {"tokens": ["x"]}, False),
        ({"tokens": ["x"]}, {"tokens": ["y"]}, True),
        ({"embedding": [0.0]}, {"embedding": [1.0]}, True),
    ],
)
def test_what_counts_as_another_answer(old: object, new: object, expected: bool) -> None:
    assert answers_differ(old, new, 0.999) is expected  # type: ignore[arg-type]
