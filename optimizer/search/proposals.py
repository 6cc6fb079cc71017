"""Propose the next candidate of a search.

Each candidate is tried, the best expected first (expectation.py), where the budget is enough for
all. Otherwise this holds for the first half of the trials (search.py), and the rest comes from
Optuna's TPE sampler (Bergstra et al. 2011), which learns from all of them.

Each question to the sampler has a seed of its own, from the number of trials before it, so that the
same results give the same proposals: a search that was killed finds its trials in the store and
asks the same questions. The study is in memory only, because the values in a file could be those of
an earlier recipe or data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from optimizer.foundation.errors import MachineError
from optimizer.search.candidates import Candidate
from optimizer.search.expectation import Expectation
from optimizer.search.trial import Trial, get_objective

QUESTIONS = 20  # questions to the sampler for a candidate that was not tried; a choice
BEYOND = 1e6  # value of a trial without an objective; more for a larger drop

Expect = Callable[[Sequence[Trial]], Expectation]


class Proposals(Protocol):
    """Source of the candidates that a search tries next."""

    def propose(self, trials: Sequence[Trial]) -> Candidate | None:
        """Return the next candidate; None where all were tried."""
        ...

    def tell(self, trial: Trial) -> None:
        """Take the trial's result of the candidate that was proposed last."""
        ...


@dataclass
class Ranked:
    """Proposals in order of expectation: candidates expected within the limits first, by objective;
    then those expected to be too large, the smallest first.

    expect: function from trials to predictions
    margin: largest drop allowed
    most: largest bytes of the model's files allowed
    """

    space: Sequence[Candidate]
    expect: Expect
    margin: float
    most: float = math.inf

    def propose(self, trials: Sequence[Trial]) -> Candidate | None:
        """Return the untried candidate that is expected to be best; None if all were tried."""
        tried = {t.candidate for t in trials}
        left = [c for c in self.space if c not in tried]
        if not left:
            return None
        expected = self.expect(trials)
        objectives, sizes = expected.objectives(left), expected.sizes(left)

        def key(i: int) -> tuple[float, bool, float, float, int]:
            beyond = max(sizes[i] - self.most, 0.0)
            drops = expected.drop(left[i]) > self.margin
            return (beyond, drops, round(objectives[i], 6), expected.error(left[i]), i)

        return left[min(range(len(left)), key=key)]

    def tell(self, trial: Trial) -> None:
        """Take nothing: `propose` gets all trials."""


class Sampled:
    """Proposals of Optuna's TPE sampler, which learns from the trials given to `tell`.

    ranked: proposals where the sampler repeats itself
    objective: value of search.objective
    seed: seed of the sampler

    Raises MachineError where Optuna is not installed.
    """

    def __init__(self, ranked: Ranked, objective: str, seed: int) -> None:
        optuna = import_optuna(len(ranked.space))
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._ranked = optuna, ranked
        self._objective, self._seed = objective, seed
        self._study = optuna.create_study()
        described = {candidate: _parameters(candidate) for candidate in ranked.space}
        self._by_parameters = {tuple(p.values()): c for c, p in described.items()}
        self._choices = {
            key: optuna.distributions.CategoricalDistribution(
                sorted({p[key] for p in described.values()})
            )
            for key in _parameters(ranked.space[0])
        }
        self._question: Any = None

    def propose(self, trials: Sequence[Trial]) -> Candidate | None:
        """Return the sampler's next candidate."""
        tried = {t.candidate for t in trials}
        self._question = None
        for attempt in range(QUESTIONS):
            seed = self._seed + QUESTIONS * len(tried) + attempt
            self._study.sampler = self._optuna.samplers.TPESampler(seed=seed)
            question = self._study.ask(self._choices)
            candidate = self._candidate(question.params)
            if candidate is not None and candidate not in tried:
                self._question = question
                return candidate
            same = next((t for t in trials if t.candidate == candidate), None)
            self._study.tell(question.number, self._value(same))
        return self._ranked.propose(trials)

    def tell(self, trial: Trial) -> None:
        """Add a candidate's trial to the study of Optuna's sampler."""
        if self._question is not None:
            self._study.tell(self._question.number, self._value(trial))
            return
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=_parameters(trial.candidate),
                distributions=self._choices,
                value=self._value(trial),
            )
        )

    def _candidate(self, parameters: dict[str, Any]) -> Candidate | None:
        """Return the candidate with the sampler's values; None if the targets do not admit it."""
        return self._by_parameters.get(tuple(parameters.get(key) for key in self._choices))

    def _value(self, trial: Trial | None) -> float:
        """Return the number of a trial that the sampler minimizes. It reads only the order of these
        numbers, so refused and stopped trials get larger ones than all others."""
        if trial is None or trial.outcome == "refused":
            return 2 * BEYOND
        value = get_objective(trial, self._objective)
        if trial.outcome == "stopped" or value is None:
            return BEYOND + min(trial.drop or 0.0, BEYOND / 2)
        return value


def import_optuna(count: int) -> Any:
    """Import Optuna, whose sampler proposes a search's candidates, and return it.

    count: number of candidates

    Raises MachineError where it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MachineError(
            "optuna is not installed, which proposes candidates where there are more than "
            "search.budget.trials",
            where="search.budget.trials",
            accepted=f"{count} or more without it",
            fix="pip install 'optimize-toolchain[search]'",
        ) from None
    return optuna


def _parameters(candidate: Candidate) -> dict[str, Any]:
    return {
        "target": candidate.target,
        "methods": "+".join(candidate.methods),
        "attention": candidate.attention,
        "finer": candidate.finer,
        "size": candidate.size,
    }
