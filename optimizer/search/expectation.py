"""Model of quality and time, by which a search orders its candidates.

Quality. Quantizing a module moves the output by its sensitivity e_i (stages/sensitivity.py).
Moves of different modules are taken as independent, so their squares add: error^2 = sum e_i^2 over
the modules that are not in higher precision. The drop of the metric is taken as c error^2, with c
fitted to the trials so far of the model at full size. The additional drop of a reduced model is not
predicted.

Size. The files of a trial of the same target and size, and the bytes by which modules in higher
precision differ; before such a trial, predicted as time is.

Time. The logarithm of (the objective / the recipe's objective) is taken as linear in the share of
weights in higher precision, with a constant per target, method, kind of attention and size: ridge
regression on the trials so far. Before any trial, a float module is assumed to cost twice as much
as an int8 module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.search.candidates import Candidate
from optimizer.search.trial import Trial, get_objective

RIDGE = 0.1  # weight of the prior, in trials; a choice
PRIOR = math.log(2)  # slope of the logarithm over the share kept finer, before any trial


@dataclass(frozen=True)
class Expectation:
    """Predictions of quality, time and size of a search's candidates that were not tried yet.

    sensitivities: {module: {"error", "weights"}}; {} if they were not measured
    kept: {candidate: modules in higher precision}
    trials: finished trials, the recipe's first
    name: value of search.objective
    added_bytes: bytes that a weight takes more in higher precision
    """

    sensitivities: Mapping[str, Mapping[str, float]]
    kept: Mapping[Candidate, Sequence[str]]
    trials: Sequence[Trial]
    name: str
    added_bytes: float = 0.0

    def error(self, candidate: Candidate) -> float:
        """Predict for a candidate the relative error of the output that quantization makes."""
        finer = set(self.kept[candidate])
        left = (m["error"] ** 2 for n, m in self.sensitivities.items() if n not in finer)
        return math.sqrt(sum(left))

    def drop(self, candidate: Candidate) -> float:
        """Predict for a candidate the drop of the metric; 0 before any trial."""
        trials = (t for t in self.trials if t.candidate.size == 1)
        known = [(self.error(t.candidate) ** 2, t.drop) for t in trials if t.drop is not None]
        squares = sum(e * e for e, _ in known)
        slope = sum(e * d for e, d in known) / squares if squares else 0.0
        return max(slope, 0.0) * self.error(candidate) ** 2

    def objectives(self, candidates: Sequence[Candidate]) -> list[float]:
        """Predict each candidate's objective, divided by the recipe's.

        For objective quality this is the expected drop, which does not depend on method and target.
        """
        if self.name == "quality":
            own = self.error(self.trials[0].candidate) if self.trials else 0.0
            return [(self.error(c) / own) ** 2 if own else 1.0 for c in candidates]
        return self._ratios(candidates, self.name)

    def sizes(self, candidates: Sequence[Candidate]) -> list[float]:
        """Predict the bytes of each candidate's files; 0 before any trial.

        They are those of the trial of the same target and size with most modules in higher
        precision, and the bytes by which the candidate's modules differ; before such a trial, by
        regression.
        """
        if not self.trials or self.trials[0].size is None:
            return [0.0] * len(candidates)
        like: dict[tuple[int, float], Trial] = {}
        for trial in sorted(self.trials, key=lambda t: t.candidate.finer):
            if trial.size is not None:
                like[trial.candidate.target, trial.candidate.size] = trial
        sizes = []
        for candidate, ratio in zip(candidates, self._ratios(candidates, "size"), strict=True):
            base = like.get((candidate.target, candidate.size))
            if base is None or base.size is None:
                sizes.append(self.trials[0].size * ratio)
            else:
                more = self._count_finer(candidate) - self._count_finer(base.candidate)
                sizes.append(base.size + self.added_bytes * more)
        return sizes

    def _count_finer(self, candidate: Candidate) -> float:
        """Count a candidate's weights of the modules in higher precision."""
        return sum(self.sensitivities[name]["weights"] for name in self.kept[candidate])

    def _ratios(self, candidates: Sequence[Candidate], name: str) -> list[float]:
        """Predict each candidate's time or size, divided by the recipe's, by ridge regression.

        name: "size", or another value of search.objective
        """
        own = get_objective(self.trials[0], name) if self.trials else None
        known = [
            (t.candidate, math.log(value / own))
            for t in self.trials
            if own and (value := get_objective(t, name))
        ]
        columns = sorted({c for t in (*candidates, *(k for k, _ in known)) for c in _constants(t)})

        def features(candidate: Candidate) -> list[float]:
            own_columns = _constants(candidate)
            return [candidate.finer, *(float(c in own_columns) for c in columns)]

        prior = np.array([PRIOR] + [0.0] * len(columns))
        x = np.array([features(c) for c, _ in known]).reshape(-1, len(prior))
        y = np.array([value for _, value in known])
        left = x.T @ x + RIDGE * np.eye(len(prior))
        beta = np.linalg.solve(left, x.T @ y + RIDGE * prior)
        return [math.exp(float(np.array(features(c)) @ beta)) for c in candidates]


def _constants(candidate: Candidate) -> set[tuple[str, str]]:
    return {
        ("target", str(candidate.target)),
        ("method", "+".join(candidate.methods)),
        ("attention", candidate.attention),
        ("size", str(candidate.size)),
    }


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Compute Kendall's tau-a between expected and measured numbers of a search's trials:
    (concordant - discordant pairs) / all pairs.

    None for fewer than two pairs.
    """
    count = len(pairs)
    if count < 2:
        return None
    signs = [
        np.sign(a[0] - b[0]) * np.sign(a[1] - b[1])
        for i, a in enumerate(pairs)
        for b in pairs[i + 1 :]
    ]
    return float(sum(signs)) / (count * (count - 1) / 2)
